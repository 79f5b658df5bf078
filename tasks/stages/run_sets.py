"""The sets of a run: which ones a stage reads, and where their shards and statistics are."""

from typing import Any

from tasks.dataset.splits import TRAIN
from tasks.stages.adapt import ADAPT
from tasks.stages.base import Run
from tasks.stages.config_check import check_scored_sets
from tasks.stages.features import FEATURES
from tasks.stages.folds import is_tested, train_folder
from tasks.stages.shard import SHARD


def scored_sets(run: Run) -> list[str]:
    """Sets to decode: those of `score.sets`, else every test set, else the validation set.

    Raises:
        StageError: If a set of `score.sets` does not exist.
    """
    present = sorted(SHARD.record(run)["sets"])
    check_scored_sets(run.config, present, of_corpus=run.bundle is not None)
    tests = [name for name in present if is_tested(name, run.config.data)]
    return list(run.config.score.sets) or tests or ["valid"]


def _set_source(run: Run, name: str, recognition: bool) -> tuple[str, str]:
    """The stage that made the shards of a set, and their folder in its output."""
    cfg = run.config.features
    folder = train_folder(run.config.data) if name == TRAIN else name
    if recognition and run.config.system.by_speaker(cfg):
        return "shard", folder
    if cfg.adapted and not recognition and name in ADAPT.record(run)["sets"]:
        return "adapt", name
    return ("features" if cfg.stored else "shard"), folder


def set_url(run: Run, name: str, recognition: bool = False) -> str:
    """URL of the shards that training reads: stored features if configured, else audio.

    Args:
        run: The run.
        name: The set.
        recognition: Whether a model is to recognize the set: features that are adapted to speakers are then made from
            audio, since the stored ones were made with transcripts.
    """
    stage, folder = _set_source(run, name, recognition)
    return run.result(stage).store.child(folder).url


def set_digest(run: Run, name: str, recognition: bool = False) -> str:
    """Digest of the index at `set_url`; arguments as there."""
    stage, folder = _set_source(run, name, recognition)
    record = run.result(stage).record
    digest: str = (record["sets"] if folder == name else record["unions"])[folder]["digest"]
    return digest


def train_stats(run: Run) -> dict[str, Any] | None:
    """Global statistics of the run's training set; None if the features do not need them."""
    if run.config.features.adapted:
        return ADAPT.record(run)["stats"] if run.config.features.cmvn == "global" else None
    record, folder = FEATURES.record(run), train_folder(run.config.data)
    return record["stats"] if folder == TRAIN else record["fold_stats"][folder]
