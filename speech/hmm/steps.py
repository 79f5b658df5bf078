"""Steps of training on a shard of utterances: pure functions, whose results can be merged in any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.hmm.align import (
    Alignment,
    alignment_of_path,
    concatenated_contexts,
    equal_alignment,
    transition_counts,
    viterbi,
)
from speech.hmm.fmllr import SILENCE_WEIGHT, FmllrStatistics, estimate_fmllr
from speech.hmm.graphs import GraphOptions, Lexicon, UtteranceGraph, state_graph, utterance_graph
from speech.hmm.lda import LdaStatistics
from speech.hmm.mllt import MlltStatistics
from speech.hmm.model import FeatureChain, HmmModel, adapt
from speech.hmm.statistics import GmmStatistics, accumulate
from speech.hmm.topology import Floats, PhoneSet, Scales
from speech.hmm.tree import ContextStatistics, DecisionTree
from speech.hmm.utterances import Adaptations, Shard, TrainingUtterance

Alignments = Mapping[str, Alignment]
"""Alignments by utterance."""
Graphs = Mapping[str, UtteranceGraph]
Likelihoods = Callable[[NDArray[np.int64]], NDArray[np.float32]]
"""Gives the log likelihoods `[T, n]` of n tied states in all frames of an utterance."""


@dataclass(frozen=True)
class AlignOptions:
    """Parameters of alignment.

    Attributes:
        beam: Of the Viterbi search, at the scale of the scaled log-likelihoods; 0 is none.
        retry_beam: Of a second try.
        acoustic_scale: Weight of the log-likelihoods.
        scales: Weights of the transitions.
    """

    beam: float = 10.0
    retry_beam: float = 40.0
    acoustic_scale: float = 0.1
    scales: Scales = field(default_factory=Scales)


@dataclass(frozen=True)
class AlignedShard:
    """Alignments and failures of a shard.

    Attributes:
        alignments: By utterance.
        failures: The reason for each utterance without an alignment.
        retried: Number of utterances that needed the wider beam.
    """

    alignments: Alignments
    failures: Mapping[str, str]
    retried: int = 0

    @property
    def score(self) -> float:
        """Mean log-likelihood of a frame along the paths."""
        frames = sum(one.num_frames for one in self.alignments.values())
        return sum(one.score * one.num_frames for one in self.alignments.values()) / max(frames, 1)


def merge_aligned(parts: Iterable[AlignedShard]) -> AlignedShard:
    """The alignments of all shards."""
    alignments: dict[str, Alignment] = {}
    failures: dict[str, str] = {}
    retried = 0
    for part in parts:
        alignments |= part.alignments
        failures |= part.failures
        retried += part.retried
    return AlignedShard(alignments, failures, retried)


def make_graphs(
    shard: Shard, phones: PhoneSet, lexicon: Lexicon, options: GraphOptions | None = None, context: bool = True
) -> dict[str, UtteranceGraph]:
    """Training graphs of a shard's utterances."""
    return {one.id: utterance_graph(phones, lexicon, one.words, options, context) for one in shard.utterances}


def align_equally(shard: Shard, phones: PhoneSet, graphs: Graphs) -> AlignedShard:
    """A first alignment without any model; see `speech.hmm.align.equal_alignment`."""
    alignments, failures = {}, {}
    for one in shard.utterances:
        found = equal_alignment(graphs[one.id], one.num_frames, phones)
        if found is None:
            failures[one.id] = f"{one.num_frames} frames are too few for its transcript"
        else:
            alignments[one.id] = found
    return AlignedShard(alignments, failures)


def align(
    model: HmmModel,
    shard: Shard,
    graphs: Graphs,
    options: AlignOptions | None = None,
    adaptations: Adaptations | None = None,
) -> AlignedShard:
    """Align a shard's utterances.

    An utterance that fails in the beam is tried again with the wider one; one that fails again is named.
    """
    options = options or AlignOptions()
    alignments: dict[str, Alignment] = {}
    failures: dict[str, str] = {}
    retried = 0
    model = model.to(shard.device)
    for one, frames in zip(shard.utterances, shard.features(model.chain, adaptations), strict=True):
        found, again = align_frames(model, graphs[one.id], partial(_likelihoods, model, frames), options)
        retried += again
        if found is None:
            failures[one.id] = no_path(len(frames))
        else:
            alignments[one.id] = found
    return AlignedShard(alignments, failures, retried)


def no_path(frames: int) -> str:
    """Failure message for an utterance with this many frames."""
    return f"no path of its transcript through {frames} frames within the beam"


def _likelihoods(model: HmmModel, frames: Tensor, pdfs: NDArray[np.int64]) -> NDArray[np.float32]:
    scores = model.gmm.log_likelihoods(frames, torch.from_numpy(pdfs).to(frames.device))
    found: NDArray[np.float32] = scores.cpu().numpy()
    return found


def align_frames(
    model: HmmModel, graph: UtteranceGraph, likelihoods: Likelihoods, options: AlignOptions
) -> tuple[Alignment | None, bool]:
    """Align an utterance.

    Args:
        model: Tree and transitions; the likelihoods may come from elsewhere.
        graph: Of the transcript.
        likelihoods: Gives the log likelihoods `[T, n]` of n tied states.
        options: Beams and scales.

    Returns:
        The alignment, None if no path within the beams reaches the end; and whether the wider beam was needed.
    """
    states = state_graph(graph, model.tree, model.transitions, options.scales)
    used, columns = np.unique(states.pdfs, return_inverse=True)
    scaled = np.float32(options.acoustic_scale) * likelihoods(used.astype(np.int64))
    path = viterbi(states, scaled, columns.astype(np.int32), options.beam or math.inf)
    again = path is None and options.beam > 0
    if again:
        path = viterbi(states, scaled, columns.astype(np.int32), options.retry_beam or math.inf)
    if path is None:
        return None, again
    score = float(scaled[np.arange(len(path)), columns[path]].mean())
    return alignment_of_path(graph, states, path, score), again


@dataclass
class Statistics:
    """Sums for one EM iteration.

    Attributes:
        gmm: Of the mixtures.
        transitions: Counts of transitions.
    """

    gmm: GmmStatistics
    transitions: Floats

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(self.gmm + other.gmm, self.transitions + other.transitions)


def _aligned(
    shard: Shard, alignments: Alignments, chain: FeatureChain, adaptations: Adaptations | None
) -> tuple[Tensor, list[Alignment]]:
    """Frames of the aligned utterances of a shard, and their alignments."""
    pairs = [
        (frames, alignments[one.id])
        for one, frames in zip(shard.utterances, shard.features(chain, adaptations), strict=True)
        if one.id in alignments
    ]
    if not pairs:
        return torch.zeros(0, 0), []
    return torch.cat([frames for frames, _ in pairs]), [alignment for _, alignment in pairs]


def _pdfs(found: Sequence[Alignment], tree: DecisionTree, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([one.pdfs(tree) for one in found]).astype(np.int64)).to(device)


def accumulate_shard(
    model: HmmModel,
    shard: Shard,
    alignments: Alignments,
    adaptations: Adaptations | None = None,
    unadapted: bool = False,
) -> Statistics:
    """The E step for a shard.

    Args:
        model: The model.
        shard: Utterances; those without alignment are left out.
        alignments: By utterance.
        adaptations: Transforms by speaker.
        unadapted: Sum features without the speakers' transforms, with the posteriors of those with them.

    Returns:
        Statistics for `speech.hmm.statistics.update` and `TransitionModel.updated`.
    """
    counts = np.zeros(len(model.transitions.log_probs))
    model = model.to(shard.device)
    frames, found = _aligned(shard, alignments, model.chain, adaptations)
    if not found:
        return Statistics(GmmStatistics.zeros(model.gmm).cpu(), counts)
    for one in found:
        counts += transition_counts(one, model.tree, model.transitions)
    pdfs = _pdfs(found, model.tree, frames.device)
    if unadapted:
        plain, _ = _aligned(shard.part(shard.utterances), alignments, model.chain, None)
        return Statistics(accumulate(model.gmm, plain, pdfs, posterior_frames=frames).cpu(), counts)
    return Statistics(accumulate(model.gmm, frames, pdfs).cpu(), counts)


def context_statistics(
    shard: Shard, alignments: Alignments, chain: FeatureChain, adaptations: Adaptations | None = None
) -> list[ContextStatistics]:
    """Statistics to grow a tree from: one, or none if no utterance has an alignment."""
    frames, found = _aligned(shard, alignments, chain, adaptations)
    return [ContextStatistics.of_frames(concatenated_contexts(found), frames.cpu().numpy())] if found else []


def lda_statistics(shard: Shard, alignments: Alignments, chain: FeatureChain, tree: DecisionTree) -> LdaStatistics:
    """Statistics for LDA of spliced frames; classes are the tree's pdfs."""
    wide = FeatureChain(chain.context)
    dim = shard.utterances[0].features.shape[1] * (2 * chain.context + 1)
    stats = LdaStatistics.zeros(tree.num_pdfs, dim)
    for one in shard.utterances:
        if one.id in alignments:
            frames = one.features.to(shard.device)
            stats.add(wide(frames), _pdfs([alignments[one.id]], tree, frames.device))
    return stats


def mllt_statistics(model: HmmModel, shard: Shard, alignments: Alignments, every: int = 1) -> MlltStatistics:
    """Statistics for MLLT; of every n-th frame only, where there are plenty."""
    stats = MlltStatistics.zeros(model.gmm.dim)
    model = model.to(shard.device)
    frames, found = _aligned(shard, alignments, model.chain, None)
    return stats.add(model.gmm, frames[::every], _pdfs(found, model.tree, frames.device)[::every]) if found else stats


def fmllr_statistics(
    model: HmmModel,
    shard: Shard,
    alignments: Alignments,
    adaptations: Adaptations | None = None,
    every: int = 1,
) -> dict[str, FmllrStatistics]:
    """Statistics for fMLLR by speaker.

    Args:
        model: The model that the adapted features should fit.
        shard: Utterances.
        alignments: By utterance.
        adaptations: The transforms so far, for the posteriors.
        every: Use every n-th frame only.
    """
    stats: dict[str, FmllrStatistics] = {}
    known = adaptations or {}
    model = model.to(shard.device)
    for speaker, ones in _by_speaker(shard, alignments).items():
        part = shard.part(ones)
        plain, found = _aligned(part, alignments, model.chain, None)
        adapted = adapt(plain, known[speaker]) if speaker in known else plain
        phones = np.concatenate([one.phones[one.phone_of_frame()] for one in found])
        weights = torch.from_numpy(np.where(phones <= model.tree.phones.noises, SILENCE_WEIGHT, 1.0))[::every]
        pdfs = _pdfs(found, model.tree, plain.device)[::every]
        zeros = FmllrStatistics.zeros(model.gmm.dim)
        stats[speaker] = zeros.add(model.gmm, plain[::every], pdfs, weights, adapted[::every])
    return stats


def _by_speaker(shard: Shard, alignments: Alignments) -> dict[str, list[TrainingUtterance]]:
    found: dict[str, list[TrainingUtterance]] = {}
    for one in shard.utterances:
        if one.id in alignments:
            found.setdefault(one.speaker, []).append(one)
    return found


def merge_speakers(parts: Iterable[Mapping[str, FmllrStatistics]]) -> dict[str, FmllrStatistics]:
    """Statistics of all shards by speaker."""
    total: dict[str, FmllrStatistics] = {}
    for part in parts:
        for speaker, stats in part.items():
            total[speaker] = total[speaker] + stats if speaker in total else stats
    return total


def estimate_transforms(parts: Iterable[Mapping[str, FmllrStatistics]]) -> dict[str, Tensor]:
    """fMLLR transforms by speaker, from the statistics of all shards."""
    return {speaker: estimate_fmllr(stats).float() for speaker, stats in sorted(merge_speakers(parts).items())}
