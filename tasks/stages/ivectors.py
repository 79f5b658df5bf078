"""I-vectors in the stage adapt: the background model and the total variability matrix are estimated through the runner.

Work is divided into groups of whole speakers. What a step finds in a group is an object of its own, and so is the model
after each iteration of EM: after a kill, neither is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from recognition.bundle import IVECTOR_FILE
from speech.features import IvectorConfig
from speech.hmm.gmm import GmmStatistics, merge
from speech.hmm.ivector import (
    BackgroundModel,
    BaumWelch,
    IvectorExtractor,
    VariabilityStatistics,
    component_schedule,
    statistics,
)
from speech.hmm.serialization import dump_value, load_value
from speech.hmm.utterances import SHARD_FRAMES, by_speaker
from storage.objects import ObjectStore
from tasks.stages import progress
from tasks.stages.align import chain_and_transforms, config_of
from tasks.stages.base import Run
from tasks.stages.feature_shards import FeatureSet, opened
from tasks.stages.runner import Piece, Workers

EXTRACTOR = Path(IVECTOR_FILE).name
"""Name of the object with the extractor of i-vectors."""
_BACKGROUND_EVERY = 5
"""The background model is estimated from every n-th frame; Kaldi's `train_diag_ubm.sh` takes every fifth, too."""
_SEED = 0
"""Of the directions in which components are split, and of the matrix that EM starts from."""
M = TypeVar("M")
History = list[float]
"""Log-likelihood before each iteration: of a frame (background model), or of a speaker (total variability)."""


class IvectorTraining:
    """Estimates an extractor from a training set, and the i-vectors of speakers.

    Args:
        run: The run, with the output of the stage align.
        cfg: The i-vectors.
        store: For intermediate results; the caller deletes it in the end.
        workers: Of the run's runner: the same ones for all iterations.
    """

    def __init__(self, run: Run, cfg: IvectorConfig, store: ObjectStore, workers: Workers) -> None:
        self._run, self._cfg, self._store, self._workers = run, cfg, store, workers
        self._align = config_of(run)
        self._sizes = component_schedule(cfg.gaussians, cfg.background_iterations)

    def estimate(self, name: str, static: FeatureSet) -> tuple[IvectorExtractor, dict[str, History]]:
        """Estimate the extractor.

        Args:
            name: The training set.
            static: Its features, of the kind that the Gaussians have.

        Returns:
            The extractor, and the log-likelihoods of the iterations of both models.
        """
        cfg = self._cfg

        def background(number: int, model: BackgroundModel) -> tuple[BackgroundModel, float]:
            stats: GmmStatistics = merge(self._map("background", f"background-{number}", name, static))
            return model.updated(stats, self._sizes[number], _SEED + number), stats.average

        def variability(number: int, extractor: IvectorExtractor) -> tuple[IvectorExtractor, float]:
            total: VariabilityStatistics = merge(self._map("variability", f"variability-{number}", name, static))
            return extractor.updated(total), total.log_likelihood / max(total.units, 1)

        first = BackgroundModel.standard(self._align.lda_dim)
        model, frames = self._iterations("background", first, len(self._sizes), background)
        self._speakers(name, static)
        start = IvectorExtractor.random(model, cfg.dim, _SEED)
        extractor, speakers = self._iterations("variability", start, cfg.iterations, variability)
        return extractor, {"background": frames, "variability": speakers}

    def of_speakers(self, name: str, static: FeatureSet, extractor: IvectorExtractor) -> str:
        """Extract an i-vector from all speech of each speaker of a set.

        Args:
            name: The set.
            static: Its features.
            extractor: From `estimate`.

        Returns:
            Name of the object with the i-vectors float32 `[R]` by speaker.
        """
        ivectors: dict[str, Tensor] = {}
        for speakers, stats in self._speakers(name, static):
            ivectors |= zip(speakers, extractor.posterior(stats).means.float(), strict=True)
        self._store.write(f"ivectors-{name}", dump_value(ivectors))
        return f"ivectors-{name}"

    def _speakers(self, name: str, static: FeatureSet) -> Iterator[tuple[list[str], BaumWelch]]:
        """Speakers and their statistics, by group; computed now, read later."""
        results = self._results("statistics", f"background-{len(self._sizes)}", name, static)
        return (load_value(self._store.read(result)) for result in results)

    def _iterations(
        self, name: str, first: M, count: int, iterate: Callable[[int, M], tuple[M, float]]
    ) -> tuple[M, History]:
        """Iterations of EM, after the last one that an earlier attempt has finished."""
        done = next((number for number in range(count, 0, -1) if self._store.exists(f"{name}-{number}")), 0)
        if not done:
            self._store.write(f"{name}-0", dump_value((first, [])))
        model, history = load_value(self._store.read(f"{name}-{done}"))
        for number in range(done, count):
            model, likelihood = iterate(number, model)
            history = [*history, likelihood]
            self._store.write(f"{name}-{number + 1}", dump_value((model, history)))
            self._store.delete_tree(f"sums-{name}-{number}")
            progress.report("adapt", number + 1, count, f"{name}: log-likelihood {likelihood:.2f}")
        return model, history

    def _map(self, step: str, model: str, name: str, static: FeatureSet) -> Iterator[Any]:
        """Yields what a step finds in each group."""
        for result in self._results(step, model, name, static):
            yield load_value(self._store.read(result))

    def _results(self, step: str, model: str, name: str, static: FeatureSet) -> list[str]:
        """Apply a step to all groups of a set; returns the names of the objects with the results."""
        folder = f"statistics-{name}" if step == "statistics" else f"sums-{model}"
        pieces: Iterator[Piece] = (
            {
                "name": str(number),
                "step": step,
                "store": self._store.url,
                "model": model,
                "result": f"{folder}/{number}",
                "statistics": f"statistics-{name}/{number}",
                "features": static.store.url,
                "digest": static.index.digest,
                "rows": rows,
                "every": _BACKGROUND_EVERY,
                "align": self._run.result("align").url,
                "device": self._align.device,
            }
            for number, rows in enumerate(speaker_groups(static, SHARD_FRAMES))
        )
        return list(self._workers.map("tasks.stages.ivectors:ivector_piece", pieces, f"{step} {name}"))


def speaker_groups(static: FeatureSet, frames: int) -> list[list[int]]:
    """Rows of a set in groups of whole speakers, each with about this many frames."""
    sizes = np.asarray(static.index.column("num_frames"))
    groups: list[list[int]] = []
    full = True
    for _, rows in sorted(by_speaker(static.index.column("speaker")).items()):
        if full:
            groups.append([])
        groups[-1] += rows
        full = sizes[groups[-1]].sum() >= frames
    return groups


def ivector_piece(piece: Piece) -> str:
    """Apply a step to a group of speakers; returns the name of the object with the result."""
    store = ObjectStore(piece["store"])
    result: str = piece["result"]
    if not store.exists(result):  # else done before a kill
        model, _ = load_value(store.read(piece["model"]))
        store.write(result, dump_value(_STEPS[piece["step"]](piece, model.to(piece["device"]))))
    return result


@torch.inference_mode()
def _background(piece: Piece, model: BackgroundModel) -> GmmStatistics:
    stats = GmmStatistics.zeros(model.gmm)
    for _, frames in _frames(piece):
        model.accumulate(frames[:: piece["every"]], stats)
    return stats.cpu()


@torch.inference_mode()
def _statistics(piece: Piece, model: BackgroundModel) -> tuple[list[str], BaumWelch]:
    by_speaker: dict[str, BaumWelch] = {}
    for speaker, frames in _frames(piece):
        own = statistics(model, frames)
        by_speaker[speaker] = by_speaker[speaker] + own if speaker in by_speaker else own
    return list(by_speaker), BaumWelch.stack(list(by_speaker.values()))


@torch.inference_mode()
def _variability(piece: Piece, extractor: IvectorExtractor) -> VariabilityStatistics:
    _, stats = load_value(ObjectStore(piece["store"]).read(piece["statistics"]))
    return extractor.accumulate(BaumWelch(stats.counts.to(piece["device"]), stats.sums.to(piece["device"])))


_STEPS: Mapping[str, Callable[[Piece, Any], Any]] = {
    "background": _background,
    "statistics": _statistics,
    "variability": _variability,
}


def _frames(piece: Piece) -> Iterator[tuple[str, Tensor]]:
    """Speaker and frames `[T, D]` of each utterance: LDA and MLLT, without fMLLR."""
    static, (chain, _) = opened(piece["features"], piece["digest"]), chain_and_transforms(piece["align"])
    for utterance in static.utterances(piece["rows"]):
        yield utterance.speaker, chain(utterance.features.to(piece["device"]))
