"""Training of GMM-HMMs: monophones, triphones, LDA with MLLT, speaker-adaptive training.

The steps are those of Kaldi's `train_mono`, `train_deltas`, `train_lda_mllt` and `train_sat`. Each iteration ends with
a checkpoint; an interrupted training continues after the last one and gives the same model.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from speech.hmm import steps
from speech.hmm.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from speech.hmm.config import HmmConfig, StageConfig, StageName
from speech.hmm.gmm import DiagGmm, GmmStatistics, split_targets, update
from speech.hmm.graphs import GraphOptions, Lexicon
from speech.hmm.model import FeatureChain, HmmModel
from speech.hmm.steps import AlignedShard, Graphs, Statistics
from speech.hmm.topology import PhoneSet, TransitionModel
from speech.hmm.transforms import LdaStatistics, MlltStatistics, estimate_lda, estimate_mllt
from speech.hmm.tree import ContextStatistics, DecisionTree, grow_tree, monophone_tree, phonetic_questions
from speech.hmm.utterances import Mapper, Shard, TrainingUtterance, make_shards
from speech.hmm.viterbi import AlignOptions

T = TypeVar("T")
STAGES: tuple[StageName, ...] = ("mono", "tri", "lda", "sat")
_VARIANCE_FLOOR = 0.01
"""Floor of variances, relative to the variance of the features; Kaldi's for the statistics of trees."""
_EVERY = 2
"""MLLT and fMLLR use every second frame, which halves their time: neighbouring frames differ little."""


class TrainingError(ValueError):
    """The data cannot be used for training."""


@dataclass(frozen=True)
class TrainingProgress:
    """Figures of an iteration.

    Attributes:
        stage: "mono", "tri", "lda" or "sat".
        iteration: From 1.
        iterations: Their number in this stage.
        log_likelihood: Of a frame, before the update.
        gaussians: Components after the update.
        failures: Utterances without alignment.
        retried: Utterances that needed the wider beam at the last alignment.
        seconds: Of this iteration.
    """

    stage: StageName
    iteration: int
    iterations: int
    log_likelihood: float
    gaussians: int
    failures: int
    retried: int
    seconds: float


class Trainer:
    """Trains stage by stage.

    Args:
        utterances: The training set.
        lexicon: Pronunciations of words.
        config: Sizes and schedules.
        folder: For checkpoints; None saves none.
        progress: Called after each iteration.
        mapper: Applies a step to all shards.
        phones: The phone set, if it is not that of the lexicon.
        device: Device for the computation on frames, such as `cuda`; models are updated on the CPU.

    Example:
        >>> trainer = Trainer(utterances, lexicon, HmmConfig(), Path("work"))
        >>> result = trainer.run("sat")
    """

    def __init__(
        self,
        utterances: Iterable[TrainingUtterance],
        lexicon: Lexicon,
        config: HmmConfig | None = None,
        folder: Path | None = None,
        progress: Callable[[TrainingProgress], None] | None = None,
        mapper: Mapper[Any] = map,
        phones: PhoneSet | None = None,
        device: str = "cpu",
    ) -> None:
        self.config = config or HmmConfig()
        self.lexicon, self.folder, self.mapper = lexicon, folder, mapper
        self.progress = progress or (lambda _: None)
        known = list(utterances)
        if not known:
            raise TrainingError("there are no utterances to train on: check the training set")
        used = {word for utterance in known for word in utterance.words}
        listed = (p for word, ps in lexicon.items() if word in used for p in ps) if phones is None else ()
        self.phones = phones or PhoneSet.of(listed, self.config.positions)
        self.shards = make_shards(known, device=device)
        by_length = sorted(known, key=lambda utterance: (utterance.num_frames, utterance.id))
        self.short_shards = make_shards(by_length[: self.config.mono_utterances], device=device)
        self._graphs: dict[str, Any] = {}

    def run(self, last: StageName = "sat") -> Checkpoint:
        """Train all stages up to one.

        Returns:
            The last stage's model, alignments and speakers' transforms.
        """
        result: Checkpoint | None = None
        for name in STAGES[: STAGES.index(last) + 1]:
            result = self.stage(name, result)
        assert result is not None
        return result

    def stage(self, name: StageName, previous: Checkpoint | None = None) -> Checkpoint:
        """Train one stage from the one before it.

        Raises:
            TrainingError: No utterance could be aligned.
        """
        config: StageConfig = getattr(self.config, name)
        folder = None if self.folder is None else self.folder / name
        saved = load_checkpoint(folder) if folder else None
        state, first = (self._begin(name, previous), 0) if saved is None else (saved, saved.iteration)
        for iteration in range(first + 1, config.iterations + 1):
            state = self._iteration(name, config, iteration, state)
            if folder:
                save_checkpoint(folder, state)
        if state.finished:
            return state
        state = self._finish(name, state)
        if folder:
            save_checkpoint(folder, state)
        return state

    # -- beginnings ------------------------------------------------------------------------------------------------

    def _begin(self, name: StageName, previous: Checkpoint | None) -> Checkpoint:
        if name == "mono":
            return self._flat_start()
        assert previous is not None, f"{name} needs the stage before it"
        options = replace(previous, stage=name, iteration=0, finished=False)
        aligned = self._aligned(name, previous.model, previous.adaptations)
        if name == "tri":
            chain = FeatureChain()
        elif name == "lda":
            chain = self._lda(previous.model, aligned)
        else:
            chain = previous.model.chain
            options = replace(options, adaptations=self._fmllr(previous.model, aligned, {}))
        model = self._tied(name, chain, aligned, options.adaptations)
        return replace(options, model=model, aligned=aligned)

    def _flat_start(self) -> Checkpoint:
        tree, chain = monophone_tree(self.phones), FeatureChain()
        graphs = self.graphs(mono=True)
        step = partial(steps.align_equally, phones=self.phones, graphs=graphs)
        aligned = steps.merge_aligned(self._map(step, short=True))
        self._check(aligned)
        stats = self._contexts(chain, aligned, {}, short=True)
        mean, variance = _moments(stats.counts.sum(), stats.sums.sum(0))
        gmm = DiagGmm.of_moments(mean.repeat(tree.num_pdfs, 1), variance.repeat(tree.num_pdfs, 1))
        model = HmmModel(tree, TransitionModel(self.phones, tree.transition_keys()), gmm, chain)
        return Checkpoint("mono", 0, model, aligned, {}, variance)

    def _lda(self, model: HmmModel, aligned: AlignedShard) -> FeatureChain:
        wide = FeatureChain(self.config.lda_context)
        step = partial(steps.lda_statistics, alignments=aligned.alignments, chain=wide, tree=model.tree)
        total: LdaStatistics = reduce(operator.add, self._map(step))
        return FeatureChain(self.config.lda_context, estimate_lda(total, self.config.lda_dim))

    def _tied(
        self, name: StageName, chain: FeatureChain, aligned: AlignedShard, adaptations: Mapping[str, Tensor]
    ) -> HmmModel:
        """A tree, and a Gaussian for each of its leaves."""
        stats = self._contexts(chain, aligned, adaptations)
        dim = stats.sums.shape[1] // 2
        floor = _VARIANCE_FLOOR * float(_moments(stats.counts.sum(), stats.sums.sum(0))[1].mean())
        rows = stats.rows()
        spoken = list(range(self.phones.noises + 1, len(self.phones) + 1))
        tables = [
            np.stack(
                [rows[(stats.contexts[:, 1] == phone) & (stats.contexts[:, 3] == state)].sum(0) for phone in spoken]
            )
            for state in range(3)
        ]
        questions = phonetic_questions(spoken, tables, floor)
        leaves: int = getattr(self.config, name).leaves
        tree = grow_tree(self.phones, stats, questions, leaves, self.config.leaf_frames, floor)
        gmm = _leaf_gaussians(tree, stats, dim, _VARIANCE_FLOOR)
        return HmmModel(tree, TransitionModel(self.phones, tree.transition_keys()), gmm, chain)

    # -- iterations ------------------------------------------------------------------------------------------------

    def _iteration(self, name: StageName, config: StageConfig, iteration: int, state: Checkpoint) -> Checkpoint:
        started = time.monotonic()
        if iteration in config.realign:
            state = replace(state, aligned=self._aligned(name, state.model, state.adaptations))
        if iteration in config.estimate and name == "lda":
            state = replace(state, model=self._mllt(state))
        if iteration in config.estimate and name == "sat":
            state = replace(state, adaptations=self._fmllr(state.model, state.aligned, state.adaptations))
        step = partial(
            steps.accumulate_shard, state.model, alignments=state.aligned.alignments, adaptations=state.adaptations
        )
        total: Statistics = reduce(operator.add, self._map(step, short=name == "mono"))
        model, floor = self._updated(config, iteration, state.model, total)
        self.progress(
            TrainingProgress(
                name,
                iteration,
                config.iterations,
                total.gmm.average,
                model.gmm.num_components,
                len(state.aligned.failures),
                state.aligned.retried,
                time.monotonic() - started,
            )
        )
        return replace(state, iteration=iteration, model=model, variance=floor)

    def _updated(
        self, config: StageConfig, iteration: int, model: HmmModel, total: Statistics
    ) -> tuple[HmmModel, Tensor]:
        """The M step, and growing mixtures."""
        sums = total.gmm.sums.sum((0, 1))
        variance = _moments(float(total.gmm.occupancies.sum()), sums.numpy())[1]
        gmm = update(model.gmm, total.gmm, _VARIANCE_FLOOR * variance, self.config.minimum_occupancy)
        if iteration <= config.growing:
            share = iteration / config.growing
            wanted = round(gmm.num_pdfs + share * max(config.gaussians - gmm.num_pdfs, 0))
            occupancies = total.gmm.occupancies.sum(1).tolist()
            targets = split_targets(occupancies, wanted, minimum=2 * self.config.minimum_occupancy)
            gmm = gmm.split(targets, iteration)
        return replace(model, gmm=gmm, transitions=model.transitions.updated(total.transitions)), variance

    def _mllt(self, state: Checkpoint) -> HmmModel:
        step = partial(steps.mllt_statistics, state.model, alignments=state.aligned.alignments, every=_EVERY)
        stats: MlltStatistics = reduce(operator.add, self._map(step))
        matrix = estimate_mllt(stats)
        chain = state.model.chain
        assert chain.matrix is not None, "MLLT without LDA"
        combined = (matrix @ chain.matrix.double()).float()
        return replace(state.model, chain=replace(chain, matrix=combined), gmm=state.model.gmm.transformed(matrix))

    def _fmllr(self, model: HmmModel, aligned: AlignedShard, adaptations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        step = partial(
            steps.fmllr_statistics,
            model,
            alignments=aligned.alignments,
            adaptations=adaptations,
            every=_EVERY,
        )
        return steps.estimate_transforms(self._map(step))

    def _finish(self, name: StageName, state: Checkpoint) -> Checkpoint:
        """For SAT: mixtures for features that are not adapted, by one pass with the posteriors of those that are."""
        if name != "sat":
            return replace(state, finished=True)
        step = partial(
            steps.accumulate_shard,
            state.model,
            alignments=state.aligned.alignments,
            adaptations=state.adaptations,
            unadapted=True,
        )
        everything: Statistics = reduce(operator.add, self._map(step))
        total: GmmStatistics = everything.gmm
        floor = _VARIANCE_FLOOR * _moments(float(total.occupancies.sum()), total.sums.sum((0, 1)).numpy())[1]
        unadapted = update(state.model.gmm, total, floor, self.config.minimum_occupancy)
        return replace(state, model=replace(state.model, unadapted=unadapted), finished=True)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def graphs(self, mono: bool) -> Graphs:
        """Training graphs, made once."""
        key = "mono" if mono else "tri"
        if key not in self._graphs:
            options = GraphOptions(self.config.silence_probability)
            step = partial(
                steps.make_graphs, phones=self.phones, lexicon=self.lexicon, options=options, context=not mono
            )
            self._graphs[key] = {k: v for part in self._map(step, short=mono) for k, v in part.items()}
        graphs: Graphs = self._graphs[key]
        return graphs

    def _aligned(self, name: StageName, model: HmmModel, adaptations: Mapping[str, Tensor]) -> AlignedShard:
        mono = name == "mono"
        options = AlignOptions(self.config.beam, self.config.retry_beam, self.config.acoustic_scale)
        step = partial(steps.align, model, graphs=self.graphs(mono), options=options, adaptations=adaptations)
        aligned = steps.merge_aligned(self._map(step, short=mono))
        self._check(aligned)
        return aligned

    def _check(self, aligned: AlignedShard) -> None:
        if not aligned.alignments:
            example = next(iter(aligned.failures.items()), ("", ""))
            raise TrainingError(
                f"none of the {len(aligned.failures)} utterances could be aligned (first {example[0]}: {example[1]}): "
                f"check that transcripts, lexicon and audio belong together"
            )

    def _contexts(
        self, chain: FeatureChain, aligned: AlignedShard, adaptations: Mapping[str, Tensor], short: bool = False
    ) -> ContextStatistics:
        step = partial(steps.context_statistics, alignments=aligned.alignments, chain=chain, adaptations=adaptations)
        return ContextStatistics.merge([stats for part in self._map(step, short) for stats in part])

    def _map(self, step: Callable[[Shard], T], short: bool = False) -> Iterable[T]:
        results: Iterable[T] = self.mapper(step, self.short_shards if short else self.shards)
        return results


def _moments(count: float, sums: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    """Mean and variance from a count and sums `[2 D]`."""
    dim = len(sums) // 2
    first, second = torch.from_numpy(sums[:dim] / count), torch.from_numpy(sums[dim:] / count)
    return first.float(), (second - first.square()).float()


def _leaf_gaussians(tree: DecisionTree, stats: ContextStatistics, dim: int, floor: float) -> DiagGmm:
    """A Gaussian for each pdf, from the statistics that the tree was grown from."""
    pdfs = tree.pdfs(stats.contexts[:, :3])[np.arange(len(stats.contexts)), stats.contexts[:, 3]]
    counts = np.bincount(pdfs, stats.counts, tree.num_pdfs)
    sums = np.zeros((tree.num_pdfs, 2 * dim))
    np.add.at(sums, pdfs, stats.sums)
    mean, variance = _moments(float(counts.sum()), sums.sum(0))
    unseen = counts < 10  # frames: too few for a variance; such as noise, where the corpus has none
    safe = np.maximum(counts, 1.0)[:, None]
    means, squares = sums[:, :dim] / safe, sums[:, dim:] / safe
    variances = np.maximum(squares - np.square(means), floor * variance.numpy())
    means[unseen], variances[unseen] = mean.numpy(), variance.numpy()
    return DiagGmm.of_moments(torch.from_numpy(means), torch.from_numpy(variances))
