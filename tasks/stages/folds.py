"""Cross-validation: each fold is sharded once, is the test set of one run, and training data of all others."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.union import union_index
from tasks.config.data import DataConfig
from tasks.config.pipeline import PipelineConfig
from tasks.dataset.sets import fold_name, is_fold
from tasks.dataset.splits import TRAIN

_FIGURES = ("wer", "cer")


class FoldError(ValueError):
    """A cross-validation cannot be run as configured."""


def union_name(number: int) -> str:
    """Folder of the index over all folds but one."""
    return f"without-{fold_name(number)}"


def train_folder(data: DataConfig) -> str:
    """Folder of the training set's index: its own, or that of the training folds.

    Raises:
        FoldError: If there are folds and none is chosen.
    """
    if not data.folds:
        return TRAIN
    if not data.fold:
        raise FoldError(
            f"data.folds is {data.folds} and no fold is chosen: use `starling run CONFIG --folds {data.folds}` for all "
            "of them, or set data.fold"
        )
    return union_name(data.fold)


def is_tested(name: str, data: DataConfig) -> bool:
    """Whether a set is a test set of this run."""
    return name == fold_name(data.fold) if is_fold(name) else name not in (TRAIN, "valid")


def write_unions(store: ObjectStore, folds: int) -> dict[str, Any]:
    """For each fold, write an index over all other folds.

    Args:
        store: Contains the folders of the folds; the indexes are written beside them.
        folds: Number of folds.

    Returns:
        Number of utterances and shards, and the digest, by folder.
    """
    parts = {fold_name(number): ShardIndex.read(store.child(fold_name(number))) for number in range(1, folds + 1)}
    written: dict[str, Any] = {}
    for number in range(1, folds + 1):
        folder = union_name(number)
        index = union_index({name: part for name, part in parts.items() if name != fold_name(number)}, TRAIN)
        index.write(store.child(folder))
        written[folder] = {"utterances": len(index), "shards": len(index.shards), "digest": index.digest}
    return written


def fold_configs(config: PipelineConfig, folds: int) -> list[PipelineConfig]:
    """The configuration of each fold's run.

    Raises:
        FoldError: If there are fewer than 2 or more than 100 folds.
    """
    if folds < 2:
        raise FoldError(f"--folds {folds}: a cross-validation needs 2 folds or more")
    if folds > 100:
        raise FoldError(f"--folds {folds}: at most 100")

    def chosen(number: int) -> PipelineConfig:
        data = config.data.model_copy(update={"folds": folds, "fold": number})
        return config.model_copy(update={"data": data})

    return [chosen(number) for number in range(1, folds + 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, sample standard deviation, minimum and maximum."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": deviation, "min": min(values), "max": max(values)}


def combine(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the folds' scores.

    Args:
        scores: For each fold, its scored sets by name.

    Returns:
        `folds` (scores of each fold), `wer` and `cer` with mean and spread over the folds, `pooled_wer` (all errors
        divided by all words: every utterance is tested once), and `sets` with the spread on each further test set.
    """
    folds = [dict(entry[fold_name(number)]) for number, entry in enumerate(scores, start=1)]
    errors = sum(fold["sub"] + fold["ins"] + fold["del"] for fold in folds)
    words = sum(fold["words"] for fold in folds)
    further = sorted({name for entry in scores for name in entry if not is_fold(name)})
    result: dict[str, Any] = {name: _spread_of(folds, name) for name in _FIGURES}
    result |= {"folds": folds, "pooled_wer": errors / words if words else None}
    result["sets"] = {
        name: {figure: _spread_of([dict(entry[name]) for entry in scores], figure) for figure in _FIGURES}
        for name in further
    }
    return result


def _spread_of(entries: list[dict[str, Any]], figure: str) -> dict[str, float] | None:
    values = [entry[figure] for entry in entries if entry[figure] is not None]
    return spread(values) if values else None
