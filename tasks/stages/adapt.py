"""Optional stage adapt: stores features that are adapted to speakers, for networks that are trained on these.

The stage follows `align` where `features.kind` is `fmllr` or `appended`. It transforms the static features of the
training and validation sets by the model's LDA and MLLT and the speakers' fMLLR, which `align` has estimated from
transcripts, and writes them as feature shards, if configured with i-vectors and features of other kinds beside them.
The extractor of i-vectors is estimated from the training set. Recognition does not read the shards: its transforms come
from hypotheses (`recognition.adaptation`).
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from pydantic import TypeAdapter
from torch import Tensor

from configurable.addresses import address_content
from configurable.files import file_sha256
from speech.features import CmvnStats, FeatureChoice, FeatureConfig
from speech.hmm.adapted import AdaptedFeatures
from speech.hmm.ivector import IvectorExtractor
from speech.hmm.serialization import load_value
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard
from storage.shards import Sample, load_part, write_shard
from storage.stages import StageOutput
from tasks.stages import progress
from tasks.stages.align import aligned_sets, chain_and_transforms, config_of
from tasks.stages.base import Inputs, Run, Stage, StageError
from tasks.stages.feature_shards import (
    FeatureSet,
    compute_features,
    feature_sample,
    has_note,
    note_name,
    opened,
    read_note,
    stored_index,
)
from tasks.stages.ivectors import EXTRACTOR, IvectorTraining
from tasks.stages.quarantined import DamageRecord, add_damaged, found_whole
from tasks.stages.runner import Piece, Workers, map_pieces, piece_name, share_out
from tasks.tracking.stage_runs import log_stage

_WORK = "work"


def _inputs(run: Run) -> Inputs:
    parts = run.config.features.components
    config: dict[str, Any] = {}
    if parts != (run.config.features,):
        config["parts"] = [address_content(part) for part in parts]
    return config, {"align": run.result("align").key}


@dataclass(frozen=True)
class _SetParts:
    """What the features of a set are made from."""

    static: FeatureSet
    """Features of the kind that the Gaussians have."""
    others: Mapping[int, FeatureSet]
    """Features of other kinds, by their position among the parts."""


class AdaptRecord(DamageRecord):
    """Sets of features that are adapted to speakers."""

    sets: dict[str, dict[str, Any]]
    """Number of utterances, and digest of the index of each set."""
    stats: NotRequired[dict[str, Any]]
    """Statistics of the training set (`CmvnStats`)."""
    ivectors: NotRequired[dict[str, Any]]
    """Gaussians and log-likelihoods of the training of i-vectors."""
    tracking: NotRequired[dict[str, Any]]
    """The MLflow run."""


def _work(run: Run, output: StageOutput) -> AdaptRecord:
    work, width = output.store.child(_WORK), run.config.features.width
    counts = {"utterances": 0, "frames": 0, "dimensions": width}
    damaged: list[QuarantinedShard] = []
    sets = {name: _parts(run, name, work, damaged) for name in aligned_sets(run)}
    ivectors, about = _ivectors(run, sets, output, work.child("ivectors"))
    record: AdaptRecord = {"counts": counts, "sets": {}}
    for name, parts in sets.items():
        index, stats = _adapted_set(run, parts, name, output.store.child(name), ivectors | {"set": name})
        counts["utterances"] += len(index)
        counts["frames"] += stats.count
        record["sets"][name] = {"utterances": len(index), "digest": index.digest}
        if name == "train":
            record["stats"] = stats.to_dict()
    if about:
        record["ivectors"] = about
        record["tracking"] = log_stage(run, "align", run.result("align").key, _figures(about))
    work.delete_tree("")
    add_damaged(record, damaged)
    return record


def _figures(about: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of the i-vectors, which go to the MLflow run of the stage align."""
    last = {f"adapt.{name}.log_likelihood": likelihoods[-1] for name, likelihoods in about["log_likelihoods"].items()}
    return last | {"adapt.background.gaussians": float(about["gaussians"])}


def _parts(run: Run, name: str, work: ObjectStore, damaged: list[QuarantinedShard]) -> _SetParts:
    """Compute what the features of a set are made from; adds damaged shards to `damaged`."""
    static, bad = compute_features(run, config_of(run).features, name, work.child(name), "adapt")
    damaged += bad
    others = {
        place: compute_features(run, part, name, work.child(f"{name}-part-{place}"), "adapt")[0]
        for place, part in enumerate(run.config.features.components)
        if not part.adapted
    }
    for place, features in others.items():
        if set(features.index.column("id")) != set(static.index.column("id")):
            raise StageError(
                f"features.parts.{place} has other utterances of the set {name} than the features of the GMM-HMM: a "
                "shard was damaged or repaired meanwhile; run the pipeline again with --from adapt"
            )
    return _SetParts(static, others)


def _ivectors(
    run: Run, sets: Mapping[str, _SetParts], output: StageOutput, work: ObjectStore
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Estimate the extractor of i-vectors, if the features have some.

    Returns:
        What a piece says about i-vectors, and what the record does.
    """
    part = AdaptedFeatures.ivector_part(run.config.features)
    if part is None:
        return {}, {}
    with Workers(run.runner, traced=False) as workers:
        training = IvectorTraining(run, part, work, workers)
        extractor, likelihoods = training.estimate("train", sets["train"].static)
        names: dict[str, str] = {}
        if part.extraction == "speaker":
            names = {name: training.of_speakers(name, parts.static, extractor) for name, parts in sets.items()}
    with tempfile.TemporaryDirectory() as folder:
        extractor.save(Path(folder) / EXTRACTOR)
        output.store.write_file(EXTRACTOR, Path(folder) / EXTRACTOR)
        digest = file_sha256(Path(folder) / EXTRACTOR)
    given: dict[str, Any] = {"extractor": [output.store.url, digest], "ivectors": [work.url, names]}
    return given, {"gaussians": extractor.model.num_components, "log_likelihoods": likelihoods}


def _adapted_set(
    run: Run, parts: _SetParts, name: str, target: ObjectStore, about: dict[str, Any]
) -> tuple[ShardIndex, CmvnStats]:
    """Write the adapted features of a set; shards of an earlier attempt are kept."""
    static = parts.static
    shards = static.index.shards
    common = about | {
        "source": static.store.url,
        "digest": static.index.digest,
        "others": {str(place): [features.store.url, features.index.digest] for place, features in parts.others.items()},
        "target": target.url,
        "align": run.result("align").url,
        "features": run.config.features.model_dump(mode="json"),
    }
    pieces = (common | {"name": piece_name(n), "numbers": n} for n in share_out(len(shards), run.runner))
    done = 0
    for made in map_pieces(run.runner, "tasks.stages.adapt:adapt_piece", pieces, f"adapt {name}"):
        done += made
        progress.report("adapt", done, len(shards), name)
    total = CmvnStats(run.config.features.width)
    for shard in shards:
        total = sum(read_note(target, shard.name, shard.count).values(), total)
    return stored_index(target, name, [shard.name for shard in shards]), total


def adapt_piece(piece: Piece) -> int:
    """Adapt the features of some shards of a set; returns the number of shards."""
    target, made = ObjectStore(piece["target"]), _AdaptedSet(piece)
    shard_of = np.asarray(made.static.index.column("shard"))
    for number in piece["numbers"]:
        name, rows = made.static.index.shards[number].name, np.flatnonzero(shard_of == number).tolist()
        if has_note(target, name, len(rows)) and load_part(target, name) is not None:
            continue
        stats = CmvnStats(made.cfg.width)
        write_shard(target, name, made.samples(rows, stats), payload="npy")
        target.write_json(note_name(name), {piece["set"]: stats.to_dict()})
    return len(piece["numbers"])


class _AdaptedSet:
    """Makes the features of a set's utterances from those that `_parts` has stored."""

    def __init__(self, piece: Piece) -> None:
        self.static = opened(piece["source"], piece["digest"])
        self.cfg: FeatureConfig = TypeAdapter(FeatureChoice).validate_python(piece["features"])
        chain, transforms = chain_and_transforms(piece["align"])
        own = f"{piece['set']}/"
        self._transforms = {
            who.removeprefix(own): transform for who, transform in transforms.items() if who.startswith(own)
        }
        self._others = {int(place): opened(*where) for place, where in piece["others"].items()}
        self._rows = {
            place: {utterance: row for row, utterance in enumerate(features.index.column("id"))}
            for place, features in self._others.items()
        }
        extractor = _extractor(*piece["extractor"]) if "extractor" in piece else None
        self._adapted = AdaptedFeatures(self.cfg, chain, extractor)
        self._ivectors: Mapping[str, Tensor] = {}
        url, names = piece.get("ivectors", ("", {}))
        if piece["set"] in names:
            self._ivectors = load_value(ObjectStore(url).read(names[piece["set"]]))

    def samples(self, rows: list[int], stats: CmvnStats) -> Iterator[Sample]:
        """Yields adapted features of some rows, and adds them to the statistics."""
        for number in rows:
            row = self.static.index.row(number)
            feats = self._features(number, row["id"], row["speaker"])
            stats.add(feats)
            yield feature_sample(row, feats)

    def _features(self, number: int, utterance: str, speaker: str) -> Tensor:
        static = self.static.read(number, speaker)
        if speaker in self._ivectors:
            ivectors: Tensor | None = self._ivectors[speaker].expand(len(static), -1)
        else:
            ivectors = self._adapted.ivectors([static])[0]
        others = {}
        for place, part in self._adapted.others.items():
            features, row = self._others[place], self._rows[place][utterance]
            others[place] = features.read(row, speaker) if part.cmvn == "speaker" else features.unnormalized(row)
        return self._adapted(static, self._transforms.get(speaker), ivectors, others)


@lru_cache(maxsize=1)
def _extractor(adapt: str, digest: str) -> IvectorExtractor:
    """The extractor of i-vectors; cached for further pieces in this process.

    Args:
        adapt: URL of the stage's output.
        digest: SHA-256 of the extractor.
    """
    with tempfile.TemporaryDirectory() as folder:
        return IvectorExtractor.load(ObjectStore(adapt).fetch(EXTRACTOR, Path(folder)))


ADAPT = Stage(
    "adapt",
    1,
    _inputs,
    _work,
    found_whole,
    pieces=_WORK,
    reads="the output of align, training and validation shards",
    writes="feature shards adapted to speakers, their statistics; `ivector.safetensors` with i-vectors",
    only="with `features.kind: fmllr` or `appended`",
)
