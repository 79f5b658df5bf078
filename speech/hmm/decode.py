"""Decoding with a graph: beam search by kaldi-decoder, in two passes with fMLLR for each speaker."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import kaldi_decoder
import kaldifst
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.hmm.aligner import pdf_confidences
from speech.hmm.config import GraphSearchConfig
from speech.hmm.decoding_graph import WordTable
from speech.hmm.fst_arrays import FstArrays
from speech.hmm.model import HmmModel, adapt
from speech.hmm.topology import Ints
from speech.hmm.transforms import SILENCE_WEIGHT, FmllrStatistics, estimate_fmllr

if TYPE_CHECKING:
    from speech.hmm.lattice import LatticeSearch

MINIMUM_FRAMES = 500
"""With fewer frames of speech a speaker is not adapted."""
_FIRST_BEAM, _FIRST_MAX_ACTIVE = 10.0, 2000
"""Limits of passes whose hypotheses only serve to estimate fMLLR; those of Kaldi's `decode_fmllr.sh`."""
PRIOR_FRAMES = 500.0
"""Weight of the average speaker when a transform is estimated, in frames: one minute of speech outweighs it."""


@dataclass(frozen=True)
class DecodeOptions:
    """Parameters of the beam search.

    Attributes:
        beam: Width of the beam, at the scale of the scaled log-likelihoods.
        max_active: Maximum number of active states per frame.
        acoustic_scale: Weight of the log-likelihoods beside the graph's costs.
    """

    beam: float = 12.0
    max_active: int = 7000
    acoustic_scale: float = 0.0625


def first_pass(cfg: GraphSearchConfig) -> DecodeOptions:
    """Parameters of the passes from whose hypotheses a speaker's transform is estimated."""
    return DecodeOptions(_FIRST_BEAM, _FIRST_MAX_ACTIVE, cfg.acoustic_scale)


def last_pass(cfg: GraphSearchConfig) -> DecodeOptions:
    """Parameters of the pass that gives the result."""
    return DecodeOptions(cfg.beam, cfg.max_active, cfg.acoustic_scale)


@dataclass(frozen=True)
class GraphPath:
    """The best path of a search through a graph, and its words.

    Attributes:
        words: The words.
        pdfs: int32 `[T]`, the tied state of each frame.
        cost: Of the path.
        complete: Whether the search ended in a final state.
        confidence: Mean posterior of the path's phones, 0 to 1; 0 if it was not computed.
        starts: int32, the frame at which the path puts out each word: its first one or a few before.
    """

    words: tuple[str, ...]
    pdfs: Ints
    cost: float
    complete: bool
    confidence: float = 0.0
    starts: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))


class _Graph:
    """A graph, as each of the searches reads it."""

    def __init__(self, constant: Any) -> None:
        self.constant = constant  # kaldi-decoder does not keep it alive

    @cached_property
    def silence(self) -> Ints:
        """int32, sorted: the tied states of silence, of which utterances without words consist."""
        return (FstArrays.of(self.constant).wordless_labels() - 1).astype(np.int32)

    @cached_property
    def lattices(self) -> LatticeSearch:
        """The search for lattices, made when it is first needed: it is compiled by numba, which few commands import."""
        from speech.hmm.lattice import LatticeSearch, compile_search

        compile_search()
        return LatticeSearch(FstArrays.of(self.constant))


class GraphSearch:
    """Searches a graph.

    Args:
        graph: The transducer, input labels pdf + 1.
        words: The output labels.
        options: Beam and scale.
        families: int32 `[P]`, the phone of each pdf (`speech.hmm.aligner`), to compute confidences.

    Attributes:
        num_states: Tied states that the graph knows: log-likelihoods must have as many columns, or more.
    """

    def __init__(
        self, graph: FstArrays, words: WordTable, options: DecodeOptions | None = None, families: Ints | None = None
    ) -> None:
        self.options = options or DecodeOptions()
        self._families = families
        self.words = words
        self.num_states = int(graph.arcs["ilabel"].max(initial=0))
        self._graph = _Graph(graph.constant())

    def with_options(self, options: DecodeOptions) -> GraphSearch:
        """A search of the same graph with another beam and scale."""
        other = copy(self)
        other.options = options
        return other

    def arrays(self) -> FstArrays:
        """The graph as arrays."""
        return FstArrays.of(self._graph.constant)

    def cheaper(self, worth: NDArray[np.float64]) -> GraphSearch:
        """A search of a graph in which each word costs less by what it is worth, by its number [words]."""
        graph = self.arrays()
        arcs = graph.arcs.copy()
        arcs["weight"] -= np.concatenate([[0.0], worth])[arcs["olabel"]].astype(np.float32)
        other = copy(self)
        other._graph = _Graph(replace(graph, arcs=arcs).constant())
        return other

    def __call__(self, log_likelihoods: NDArray[np.float32]) -> GraphPath:
        """Decode log-likelihoods `[T, P]` (or posteriors minus priors), not scaled.

        Raises:
            ValueError: They are of fewer states than the graph's.
        """
        if len(log_likelihoods) == 0:
            return GraphPath((), np.zeros(0, dtype=np.int32), 0.0, False)
        stream = self.stream()
        stream.accept(log_likelihoods)
        path = stream.path()
        return replace(path, confidence=self._confidence(log_likelihoods, path.pdfs))

    @property
    def silence(self) -> Ints:
        """int32, sorted: the tied states of silence; none if the language model has no sentence without words."""
        return self._graph.silence

    def stream(self) -> GraphSearchStream:
        """Begin the search in an utterance whose frames come one after another."""
        return GraphSearchStream(self)

    def prepare_lists(self) -> None:
        """Make and compile what `nbest` needs, before the first utterance."""
        assert self._graph.lattices

    def nbest(self, log_likelihoods: NDArray[np.float32], count: int, lattice_beam: float) -> list[GraphPath]:
        """The best hypotheses with different words, from a lattice; the best first.

        Args:
            log_likelihoods: `[T, P]`, as for one hypothesis.
            count: Most hypotheses.
            lattice_beam: Hypotheses with a cost this much above the best one's are left out.

        Returns:
            The hypotheses, without confidences; none if the search lost all paths.

        Raises:
            ValueError: The log-likelihoods are of fewer states than the graph's.
        """
        from speech.hmm.lattice import LatticeOptions, best_paths

        options = LatticeOptions(self.options.beam, self.options.max_active, lattice_beam)
        lattice = self._graph.lattices(self._scaled(log_likelihoods), options)
        if lattice is None:
            return []
        return [
            GraphPath(
                words=tuple(self.words.words[word - 1] for word in path.words),
                pdfs=path.pdfs,
                cost=path.cost,
                complete=lattice.complete,
                starts=np.array(path.starts, dtype=np.int32),
            )
            for path in best_paths(lattice, count, lattice_beam)
        ]

    def _scaled(self, log_likelihoods: NDArray[np.float32]) -> NDArray[np.float32]:
        if log_likelihoods.shape[1] < self.num_states:  # kaldi-decoder reads beyond a row's end
            raise ValueError(
                f"the graph has {self.num_states} states, the log-likelihoods {log_likelihoods.shape[1]}: decode with "
                "the model that the graph was made from"
            )
        return np.ascontiguousarray(self.options.acoustic_scale * log_likelihoods, dtype=np.float32)

    def _confidence(self, log_likelihoods: NDArray[np.float32], pdfs: Ints) -> float:
        if self._families is None or len(pdfs) != len(log_likelihoods):
            return 0.0
        return float(pdf_confidences(torch.from_numpy(log_likelihoods), pdfs, self._families).mean())


class GraphSearchStream:
    """The search in one utterance whose frames come one after another; it finds what the search in all of them finds.

    Args:
        search: Whose graph is searched; threads share it, but not this.
    """

    def __init__(self, search: GraphSearch) -> None:
        options = kaldi_decoder.FasterDecoderOptions(beam=search.options.beam, max_active=search.options.max_active)
        self._search, self._frames = search, 0
        self._decoder = kaldi_decoder.FasterDecoder(search._graph.constant, options)
        self._decoder.init_decoding()

    def accept(self, log_likelihoods: NDArray[np.float32]) -> None:
        """Go on with further log-likelihoods `[T, P]`, as for `GraphSearch`."""
        if len(log_likelihoods):
            scaled = self._search._scaled(log_likelihoods)
            self._decoder.advance_decoding(kaldi_decoder.DecodableCtc(scaled, self._frames))
            self._frames += len(log_likelihoods)

    def path(self, last: bool = True) -> GraphPath:
        """The best path, without a confidence; `last`: nothing follows, so that it ends in a final state if one can."""
        succeeded, lattice = self._decoder.get_best_path(last) if self._frames else (False, None)
        if not succeeded:
            return GraphPath((), np.zeros(0, dtype=np.int32), float("inf") if self._frames else 0.0, False)
        _, labels, words, weight = kaldifst.get_linear_symbol_sequence(lattice)
        names = tuple(self._search.words.words[word - 1] for word in words)
        pdfs, cost = np.array(labels, dtype=np.int32) - 1, float(weight.value1 + weight.value2)
        return GraphPath(names, pdfs, cost, self._decoder.reached_final(), starts=word_starts(lattice))


def word_starts(path: Any) -> Ints:
    """The frame at which each word of a linear lattice stands."""
    rows = (line.split() for line in path.to_str().splitlines())
    arcs = {int(row[0]): (int(row[1]), int(row[2]), int(row[3])) for row in rows if len(row) >= 4}
    state, frame, starts = path.start, 0, []
    while state in arcs:
        state, label, word = arcs[state]
        if word:
            starts.append(frame)
        frame += label > 0
    return np.array(starts, dtype=np.int32)


def decode_plain(
    model: HmmModel, decoder: GraphSearch, features: Sequence[Tensor], transform: Tensor | None = None
) -> list[GraphPath]:
    """Decode utterances in one pass.

    Args:
        model: The model.
        decoder: Over the model's graph.
        features: Static features of each utterance.
        transform: The speaker's fMLLR `[D, D + 1]`; without it, a speaker-adapted model decodes by its mixtures for
            features that are not adapted.
    """
    gmm = model.unadapted or model.gmm if transform is None else model.gmm
    return [decoder(gmm.log_likelihoods(model.chain(frames, transform)).cpu().numpy()) for frames in features]


def speaker_transform(
    model: HmmModel,
    features: Sequence[Tensor],
    hypotheses: Sequence[GraphPath],
    transform: Tensor | None = None,
    passes: int = 3,
    minimum: float = MINIMUM_FRAMES,
    speech: Sequence[Tensor] | None = None,
) -> Tensor:
    """A speaker's fMLLR transform, estimated from hypotheses.

    `PRIOR_FRAMES` frames of the average speaker (`FmllrStatistics.expected`) keep it near the identity if there is
    little speech.

    Args:
        model: The speaker-adapted model.
        features: Of all of the speaker's utterances, static.
        hypotheses: Their hypotheses.
        transform: The transform so far, for the first posteriors of components.
        passes: Number of times that posteriors and transform are computed.
        minimum: With fewer frames, the speaker is not adapted.
        speech: Which frames are loud enough for speech, bool `[T]` for each utterance; the others count as silence,
            whatever the hypothesis has there. By default, all may be speech.

    Returns:
        float32 `[D, D + 1]`.
    """
    dim, heard = model.gmm.dim, speech or [torch.ones(len(frames), dtype=torch.bool) for frames in features]
    aligned = zip(map(model.chain, features), hypotheses, heard, strict=True)
    usable = [(frames, hyp.pdfs, loud) for frames, hyp, loud in aligned if len(frames) and len(hyp.pdfs) == len(frames)]
    if not usable:
        return torch.eye(dim, dim + 1)
    frames = torch.cat([chosen for chosen, _, _ in usable])
    pdfs = torch.from_numpy(np.concatenate([states for _, states, _ in usable]).astype(np.int64))
    quiet = torch.isin(pdfs, torch.from_numpy(noise_pdfs(model).astype(np.int64)))
    quiet |= ~torch.cat([loud for _, _, loud in usable])
    weights = torch.where(quiet, SILENCE_WEIGHT, 1.0)
    prior = FmllrStatistics.expected(model.gmm, PRIOR_FRAMES)
    for _ in range(passes):
        adapted = frames if transform is None else adapt(frames, transform)
        stats = FmllrStatistics.zeros(dim).add(model.gmm, frames, pdfs, weights, adapted)
        if stats.count < minimum:
            return torch.eye(dim, dim + 1)
        transform = estimate_fmllr(stats + prior, minimum).float()
    assert transform is not None
    return transform


def noise_pdfs(model: HmmModel) -> Ints:
    """The pdfs of silence and noise."""
    noises = np.arange(1, model.tree.phones.noises + 1, dtype=np.int32)
    table = model.tree.pdfs(np.stack([0 * noises, noises, 0 * noises], axis=1))
    return np.unique(table[table >= 0])


def adapt_to_speaker(
    model: HmmModel,
    decoder: GraphSearch,
    features: Sequence[Tensor],
    passes: int = 2,
    minimum: float = MINIMUM_FRAMES,
    speech: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, list[list[GraphPath]]]:
    """Estimate a speaker's fMLLR from hypotheses: decode, estimate, decode with the transform, estimate again.

    Args:
        model: A speaker-adapted model.
        decoder: Over the model's graph.
        features: Static features of each utterance.
        passes: Number of times to decode and estimate.
        minimum: With fewer frames, the speaker is not adapted.
        speech: As for `speaker_transform`.

    Returns:
        The transform `[D, D + 1]`, None without a pass, and the hypotheses of each pass, the first without adaptation.
    """
    transform: Tensor | None = None
    hypotheses: list[list[GraphPath]] = []
    for _ in range(passes):
        hypotheses.append(decode_plain(model, decoder, features, transform))
        transform = speaker_transform(model, features, hypotheses[-1], transform, minimum=minimum, speech=speech)
    return transform, hypotheses


def decode_speaker(
    model: HmmModel,
    decoder: GraphSearch,
    features: Sequence[Tensor],
    passes: int = 2,
    minimum: float = MINIMUM_FRAMES,
    speech: Sequence[Tensor] | None = None,
    first: GraphSearch | None = None,
) -> list[list[GraphPath]]:
    """Decode a speaker's utterances, first without adaptation, then with fMLLR from the hypotheses before.

    Args:
        model: A speaker-adapted model.
        decoder: Over the model's graph.
        features: Static features of each utterance.
        passes: Number of times to estimate fMLLR and decode again.
        minimum: With fewer frames, the speaker is not adapted.
        speech: As for `speaker_transform`.
        first: Decodes in all passes but the last; by default, as in the last.

    Returns:
        The hypotheses after each pass, the first without adaptation.
    """
    transform, hypotheses = adapt_to_speaker(model, first or decoder, features, passes, minimum, speech)
    return [*hypotheses, decode_plain(model, decoder, features, transform)]
