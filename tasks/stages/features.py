"""Stage features: statistics for mean and variance normalization and, on request, stored feature shards.

Features are computed on the fly on the training device unless `features.stored` is set. Statistics are those of the
training set (`cmvn: global`), or of every speaker over all sets (`cmvn: speaker`).
"""

from functools import partial
from typing import Any

from configurable.addresses import address_content
from speech.features import FeatureConfig, feature_dim
from speech.features.cmvn import CmvnStats
from storage.quarantine import QuarantinedShard
from storage.stages import StageOutput
from tasks.dataset.sets import fold_name, is_trained
from tasks.dataset.speeds import copy_name
from tasks.stages import progress
from tasks.stages.base import Inputs, Run, Stage, StageError
from tasks.stages.feature_shards import SpeakerStats, add_statistics, features_of_set
from tasks.stages.folds import union_name, write_unions
from tasks.stages.quarantined import DamageRecord, add_damaged, found_whole
from tasks.stages.shard import SHARD

_OF_ALL_SETS = "statistics of all sets"
"""In the address of speakers' statistics, as those were of a speaker's last set before, and of all unknown speakers as
one; others keep their address."""


class FeaturesRecord(DamageRecord):
    """Statistics of the audio's features, and the sets of stored ones."""

    stats: dict[str, Any] | None
    """Statistics of the training set (`CmvnStats`), if features are normalized by them."""
    fold_stats: dict[str, dict[str, Any] | None]
    """The same of all folds but one, by the folder of their index."""
    speakers: dict[str, dict[str, Any]]
    """Statistics of each known speaker, if features are normalized by them; the utterance's own serve for others."""
    sets: dict[str, dict[str, Any]]
    """Number of utterances, bytes, and digest of the index of each set of stored features."""
    unions: dict[str, dict[str, Any]]
    """The same of the indexes over all folds but one."""


def _needed(cfg: FeatureConfig, sets: list[str]) -> list[str]:
    """Sets that the configuration needs statistics or stored features of."""
    if cfg.adapted:
        return []
    if cfg.stored or cfg.cmvn == "speaker":
        return sets
    return [name for name in sets if is_trained(name)] if cfg.cmvn == "global" else []


def _inputs(run: Run) -> Inputs:
    sets = SHARD.record(run)["sets"]
    if run.bundle is None and not any(is_trained(name) for name in sets):
        raise StageError(
            f"there is no training set, only {', '.join(sorted(sets))}: check data.sources.*.set. The shards are "
            "complete; `starling evaluate MODEL CORPUS` scores a model on a corpus without training data"
        )
    config = {"features": address_content(run.config.features), "sample_rate": run.config.data.sample_rate}
    if run.config.features.cmvn == "speaker":
        config["speakers"] = _OF_ALL_SETS
    return config, {name: entry["digest"] for name, entry in sets.items()}


def _work(run: Run, output: StageOutput) -> FeaturesRecord:
    cfg = run.config.features
    shards = run.result("shard").store
    sets: dict[str, Any] = {}
    speakers: SpeakerStats = {}
    global_stats: dict[str, CmvnStats] = {}
    frames = 0
    damaged: list[QuarantinedShard] = []
    sharded = SHARD.record(run)["sets"]
    needed = _needed(cfg, sorted(sharded))
    unknown = {copy_name("", speed) for speed in (1.0, *run.config.data.speeds)}
    parts = progress.Parts("features", {name: sharded[name]["utterances"] for name in needed})
    for name in needed:
        on_progress = partial(parts.report, name)
        stats, index, count, bad = features_of_set(run, name, shards.child(name), output.store.child(name), on_progress)
        frames += count
        damaged += bad
        if is_trained(name) and cfg.cmvn == "global":
            global_stats[name] = sum(stats.values(), CmvnStats(next(iter(stats.values())).dim))
        if cfg.cmvn == "speaker":
            add_statistics(speakers, {who: value for who, value in stats.items() if who not in unknown})
        if index is not None:
            sets[name] = {"utterances": len(index), "bytes": sum(s.bytes for s in index.shards), "digest": index.digest}
    counts = {"frames": frames, "dimensions": feature_dim(cfg, run.config.data.sample_rate)}
    if sets:
        counts["stored"] = sum(entry["utterances"] for entry in sets.values())
    folds = run.config.data.folds
    record: FeaturesRecord = {
        "counts": counts,
        "stats": _train_stats(global_stats),
        "fold_stats": {union_name(n): _train_stats(global_stats, n) for n in range(1, folds + 1)},
        "speakers": {who: value.to_dict() for who, value in speakers.items()},
        "sets": sets,
        "unions": write_unions(output.store, folds) if folds and cfg.stored else {},
    }
    add_damaged(record, damaged)
    return record


def _train_stats(stats: dict[str, CmvnStats], without: int = 0) -> dict[str, Any] | None:
    """Statistics of all training data, except one fold."""
    chosen = [value for name, value in sorted(stats.items()) if name != fold_name(without)]
    return sum(chosen[1:], chosen[0]).to_dict() if chosen else None


FEATURES = Stage(
    "features",
    1,
    _inputs,
    _work,
    found_whole,
    pieces="",
    evaluates=True,
    reads="shards",
    writes="CMVN statistics; feature shards if `features.stored`",
)
