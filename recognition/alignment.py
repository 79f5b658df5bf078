"""Forced alignment of a set of shards with a network: of tied states, or with CTC.

    network = CtcAligner.load(folder, "cpu", {})
    for row, utterance in align_set(network, open_set(url, network.recognizer.spec.sample_rate, cache)):
        print(utterance.id, utterance.alignment or utterance.failure)

Both take audio or features with transcripts, and give words and phones or tokens with times (`speech.alignments`); as
does a GMM-HMM (`speech.hmm.aligner`).

Tied states: Viterbi search with scaled likelihoods in place of the mixtures' (Bourlard and Morgan 1994). CTC: see
`speech.ctc_alignment`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from devices.padding import frame_multiple, rounded_up
from devices.portions import Portions
from recognition.bundle import BundleSpec, load_bundle, load_spec
from recognition.data.dataset import Batch, SpeechDataset
from recognition.inference import whole_batches
from recognition.recognizer import Recognizer
from recognition.systems.acoustic import FrameRecognizer, Scores
from speech.alignments import AlignedUtterance
from speech.ctc_alignment import AlignmentError, align_tokens
from speech.decoding.greedy import GreedyConfig, GreedyDecoder
from speech.features.cmvn import CmvnStats
from speech.frontend import FrontEnd
from speech.hmm.aligner import Aligner
from speech.hmm.priors import scaled_likelihoods
from speech.hmm.utterances import InMemoryUtterance, Shard
from speech.hmm.viterbi import align_frames, no_path
from speech.hypotheses import DecodeError
from speech.models.networks.base import TrainableNetwork
from storage.reading import ShardError

T = TypeVar("T")


class NetworkAligner(ABC, Generic[T]):
    """Aligns batches of utterances with a network, whose outputs for a batch have the type T."""

    @abstractmethod
    def outputs(self, batch: Batch) -> T:
        """The network's outputs for a batch."""

    @abstractmethod
    def align(self, batch: Batch, outputs: T) -> Iterator[AlignedUtterance]:
        """Align the utterances of a batch, in order; those that cannot be aligned have the reason."""


def align_set(
    network: NetworkAligner[T],
    dataset: SpeechDataset,
    rows: Sequence[int] | None = None,
    *,
    batch_seconds: float = 240.0,
    on_damage: Callable[[ShardError], object] | None = None,
) -> Iterator[tuple[int, AlignedUtterance]]:
    """Align the transcripts of a set with its speech.

    Args:
        network: The network.
        dataset: The set.
        rows: Rows of the utterances in its index; all by default.
        batch_seconds: Seconds of audio in a batch, padding included.
        on_damage: Called once for each damaged shard; without it the first damaged shard raises.

    Yields:
        The row of an utterance, and what became of it; utterances of damaged shards are left out.
    """
    portions = Portions()
    wanted = np.arange(len(dataset.index)) if rows is None else np.asarray(rows, dtype=np.int64)
    for batch in whole_batches(dataset, wanted, batch_seconds, on_damage):
        for part, outputs in portions.each(batch, network.outputs):
            yield from zip(part.rows.tolist(), network.align(part, outputs), strict=True)


@dataclass(frozen=True)
class CtcAligner(NetworkAligner[Scores]):
    """Aligns with a CTC model; recognizes the best token of each frame, too.

    Attributes:
        recognizer: The model.
    """

    recognizer: FrameRecognizer

    @classmethod
    def load(cls, bundle: Path, device: str, speakers: Mapping[str, CmvnStats]) -> CtcAligner:
        """Load a model from the folder of its bundle.

        Raises:
            ValueError: It is not a CTC model.
        """
        try:
            load_spec(bundle).system.require("forced alignment")
        except DecodeError as error:
            raise ValueError(f"{bundle} is not a CTC model: {error}") from error
        recognizer = Recognizer.load(bundle, None, device, dict(speakers))
        assert isinstance(recognizer, FrameRecognizer)
        return cls(recognizer)

    @override
    def outputs(self, batch: Batch) -> Scores:
        return self.recognizer.encode(batch.inputs, batch.lengths, batch.speakers)

    @override
    def align(self, batch: Batch, outputs: Scores) -> Iterator[AlignedUtterance]:
        tokenizer, frontend = self.recognizer.tokenizer, self.recognizer.frontend
        step = 1 / frontend.sample_rate if batch.inputs.ndim == 2 else frontend.cfg.hop_ms / 1000
        heard = GreedyDecoder(GreedyConfig(), tokenizer).decode(outputs.log_probs, outputs.frames)
        for i, (name, text) in enumerate(zip(batch.ids, batch.texts, strict=True)):
            log_probs = outputs.log_probs[i, : int(outputs.frames[i])]
            times = self.recognizer.times(outputs, i, end=int(batch.lengths[i]) * step)
            alignment, failure = None, ""
            try:
                alignment = align_tokens(name, log_probs, tokenizer, text, times)
            except AlignmentError as error:
                failure = str(error)
            yield AlignedUtterance(name, text, alignment, failure, heard[i].text)


@dataclass(frozen=True)
class StateAligner(NetworkAligner[list[NDArray[np.float32]]]):
    """Aligns with a network whose outputs are tied states.

    Attributes:
        spec: What its bundle says.
        model: The network.
        frontend: Its front end.
        hmm: Tree, transitions and lexicon of the GMM-HMM that the states come from.
        device: Where the network and its front end compute.
    """

    spec: BundleSpec
    model: TrainableNetwork
    frontend: FrontEnd
    hmm: Aligner
    device: torch.device

    @classmethod
    def load(cls, bundle: Path, hmm: Aligner, device: torch.device, speakers: Mapping[str, CmvnStats]) -> StateAligner:
        """Load a network from the folder of its bundle.

        Raises:
            BundleError: The folder is no bundle, or the bundle is damaged.
            ValueError: Its outputs are not tied states.
        """
        spec, model = load_bundle(bundle)
        if spec.states is None:
            raise ValueError(f"{bundle} has a network for tokens, not for tied states: name a hybrid recognizer's")
        return cls(spec, model.to(device).eval(), spec.build_frontend(dict(speakers)).to(device), hmm, device)

    @override
    @torch.no_grad()
    def outputs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log likelihoods of a batch's utterances, each `[T, P]` up to a constant for each frame; all frames count."""
        assert self.spec.states is not None
        feats, counts = self.frontend(batch.inputs.to(self.device), batch.lengths.to(self.device), batch.speakers)
        log_probs, frames = self.model(rounded_up(feats, frame_multiple(self.device)), counts)
        priors, factor = self.spec.states.log_priors, self.spec.frame_factor
        rows = zip(log_probs.cpu().numpy(), frames.tolist(), strict=True)
        return [scaled_likelihoods(row[:count], priors, factor) for row, count in rows]

    @override
    def align(self, batch: Batch, outputs: list[NDArray[np.float32]]) -> Iterator[AlignedUtterance]:
        model, options = self.hmm.model, self.hmm.options
        words = [tuple(text.split()) for text in batch.texts]
        utterances = [
            InMemoryUtterance(*about) for about in zip(batch.ids, batch.speakers, batch.inputs, words, strict=True)
        ]
        graphs = self.hmm.graphs([Shard(utterances)])
        assert self.spec.states is not None
        shift = self.spec.states.frame_shift_ms / 1000
        for utterance, text, likelihoods in zip(utterances, batch.texts, outputs, strict=True):
            path, _ = align_frames(model, graphs[utterance.id], partial(_columns, likelihoods), options)
            if path is None:
                yield AlignedUtterance(utterance.id, text, None, no_path(len(likelihoods)))
            else:
                alignment = path.alignment(utterance.id, utterance.words, model.tree, frame_seconds=shift)
                yield AlignedUtterance(utterance.id, text, alignment)


def _columns(likelihoods: NDArray[np.float32], pdfs: NDArray[np.int64]) -> NDArray[np.float32]:
    return likelihoods[:, pdfs]
