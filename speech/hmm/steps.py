"""Steps of training on a shard of utterances: pure functions, whose results can be merged in any order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.hmm.gmm import GmmStatistics, accumulate
from speech.hmm.graphs import GraphOptions, Lexicon, UtteranceGraph, utterance_graph
from speech.hmm.model import FeatureChain, HmmModel, adapt
from speech.hmm.topology import Floats, PhoneSet
from speech.hmm.transforms import SILENCE_WEIGHT, FmllrStatistics, LdaStatistics, MlltStatistics, estimate_fmllr
from speech.hmm.tree import ContextStatistics, DecisionTree
from speech.hmm.utterances import Adaptations, Shard, TrainingUtterance
from speech.hmm.viterbi import (
    AlignOptions,
    StatePath,
    align_frames,
    concatenated_contexts,
    equal_path,
    no_path,
    transition_counts,
)

Alignments = Mapping[str, StatePath]
"""Alignments by utterance."""
Graphs = Mapping[str, UtteranceGraph]


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
        paths = self.alignments.values()
        return sum(path.score * path.num_frames for path in paths) / max(sum(path.num_frames for path in paths), 1)


def merge_aligned(parts: Iterable[AlignedShard]) -> AlignedShard:
    """The alignments of all shards."""
    alignments: dict[str, StatePath] = {}
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
    return {
        utterance.id: utterance_graph(phones, lexicon, utterance.words, options, context)
        for utterance in shard.utterances
    }


def align_equally(shard: Shard, phones: PhoneSet, graphs: Graphs) -> AlignedShard:
    """A first alignment without any model: `equal_path` for each utterance."""
    alignments, failures = {}, {}
    for utterance in shard.utterances:
        path = equal_path(graphs[utterance.id], utterance.num_frames, phones)
        if path is None:
            failures[utterance.id] = f"{utterance.num_frames} frames are too few for its transcript"
        else:
            alignments[utterance.id] = path
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
    alignments: dict[str, StatePath] = {}
    failures: dict[str, str] = {}
    retried = 0
    model = model.to(shard.device)
    for utterance, frames in zip(shard.utterances, shard.features(model.chain, adaptations), strict=True):
        path, again = align_frames(model, graphs[utterance.id], partial(_likelihoods, model, frames), options)
        retried += again
        if path is None:
            failures[utterance.id] = no_path(len(frames))
        else:
            alignments[utterance.id] = path
    return AlignedShard(alignments, failures, retried)


def _likelihoods(model: HmmModel, frames: Tensor, pdfs: NDArray[np.int64]) -> NDArray[np.float32]:
    scores = model.gmm.log_likelihoods(frames, torch.from_numpy(pdfs).to(frames.device)).cpu()
    return np.asarray(scores.numpy(), dtype=np.float32)


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
) -> tuple[Tensor, list[StatePath]]:
    """Frames of the aligned utterances of a shard, and their alignments."""
    pairs = [
        (frames, alignments[utterance.id])
        for utterance, frames in zip(shard.utterances, shard.features(chain, adaptations), strict=True)
        if utterance.id in alignments
    ]
    if not pairs:
        return torch.zeros(0, 0), []
    return torch.cat([frames for frames, _ in pairs]), [path for _, path in pairs]


def _pdfs(paths: Sequence[StatePath], tree: DecisionTree, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([path.pdfs(tree) for path in paths]).astype(np.int64)).to(device)


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
        Statistics for `speech.hmm.gmm.update` and `TransitionModel.updated`.
    """
    counts = np.zeros(len(model.transitions.log_probs))
    model = model.to(shard.device)
    frames, paths = _aligned(shard, alignments, model.chain, adaptations)
    if not paths:
        return Statistics(GmmStatistics.zeros(model.gmm).cpu(), counts)
    for path in paths:
        counts += transition_counts(path, model.tree, model.transitions)
    pdfs = _pdfs(paths, model.tree, frames.device)
    if unadapted:
        plain, _ = _aligned(shard.part(shard.utterances), alignments, model.chain, None)
        return Statistics(accumulate(model.gmm, plain, pdfs, posterior_frames=frames).cpu(), counts)
    return Statistics(accumulate(model.gmm, frames, pdfs).cpu(), counts)


def context_statistics(
    shard: Shard, alignments: Alignments, chain: FeatureChain, adaptations: Adaptations | None = None
) -> list[ContextStatistics]:
    """Statistics to grow a tree from: one, or none if no utterance has an alignment."""
    frames, paths = _aligned(shard, alignments, chain, adaptations)
    return [ContextStatistics.of_frames(concatenated_contexts(paths), frames.cpu().numpy())] if paths else []


def lda_statistics(shard: Shard, alignments: Alignments, chain: FeatureChain, tree: DecisionTree) -> LdaStatistics:
    """Statistics for LDA of spliced frames; classes are the tree's pdfs."""
    wide = FeatureChain(chain.context)
    dim = shard.utterances[0].features.shape[1] * (2 * chain.context + 1)
    stats = LdaStatistics.zeros(tree.num_pdfs, dim)
    for utterance in shard.utterances:
        if utterance.id in alignments:
            frames = utterance.features.to(shard.device)
            stats.add(wide(frames), _pdfs([alignments[utterance.id]], tree, frames.device))
    return stats


def mllt_statistics(model: HmmModel, shard: Shard, alignments: Alignments, every: int = 1) -> MlltStatistics:
    """Statistics for MLLT; of every n-th frame only, where there are plenty."""
    stats = MlltStatistics.zeros(model.gmm.dim)
    model = model.to(shard.device)
    frames, paths = _aligned(shard, alignments, model.chain, None)
    return stats.add(model.gmm, frames[::every], _pdfs(paths, model.tree, frames.device)[::every]) if paths else stats


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
    for speaker, utterances in _by_speaker(shard, alignments).items():
        part = shard.part(utterances)
        plain, paths = _aligned(part, alignments, model.chain, None)
        adapted = adapt(plain, known[speaker]) if speaker in known else plain
        phones = np.concatenate([path.phones[path.phone_of_frame()] for path in paths])
        weights = torch.from_numpy(np.where(phones <= model.tree.phones.noises, SILENCE_WEIGHT, 1.0))[::every]
        pdfs = _pdfs(paths, model.tree, plain.device)[::every]
        zeros = FmllrStatistics.zeros(model.gmm.dim)
        stats[speaker] = zeros.add(model.gmm, plain[::every], pdfs, weights, adapted[::every])
    return stats


def _by_speaker(shard: Shard, alignments: Alignments) -> dict[str, list[TrainingUtterance]]:
    speakers: dict[str, list[TrainingUtterance]] = {}
    for utterance in shard.utterances:
        if utterance.id in alignments:
            speakers.setdefault(utterance.speaker, []).append(utterance)
    return speakers


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
