"""Optional stage adapt: stores features of the speaker-adapted GMM-HMM, for networks that are trained on these.

The stage follows `align` where `features.kind` is `fmllr`. It transforms the static features of the training and
validation sets by the model's LDA and MLLT and the speakers' fMLLR, which `align` has estimated from transcripts, and
writes them as feature shards. Recognition does not read them: its transforms come from hypotheses
(`speech.adaptation`).
"""

import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from speech.features import CmvnStats
from speech.hmm.model import FeatureChain
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard
from storage.shards import Sample, load_part, write_shard
from storage.stages import StageOutput
from tasks.stages import progress
from tasks.stages.align import aligned_sets, config_of
from tasks.stages.align_data import FeatureSet, compute_features, opened
from tasks.stages.align_model import AlignmentModel
from tasks.stages.base import Inputs, Run, Stage
from tasks.stages.features import (
    feature_sample,
    found_whole,
    has_note,
    note_name,
    quarantine_record,
    read_note,
    stored_index,
)
from tasks.stages.runner import Piece, map_pieces, piece_name, share_out

_WORK, _TRANSFORMS = "work", "speakers.safetensors"


def _inputs(run: Run) -> Inputs:
    return {}, {"align": run.result("align").key}


def _work(run: Run, output: StageOutput) -> dict[str, Any]:
    work = output.store.child(_WORK)
    counts = {"utterances": 0, "frames": 0, "dimensions": config_of(run).lda_dim}
    damaged: list[QuarantinedShard] = []
    record: dict[str, Any] = {"sets": {}}
    for name in aligned_sets(run):
        static, bad = compute_features(run, config_of(run).features, name, work.child(name), "adapt")
        damaged += bad
        index, stats = _adapted_set(run, static, name, output.store.child(name))
        counts["utterances"] += len(index)
        counts["frames"] += stats.count
        record["sets"][name] = {"utterances": len(index), "digest": index.digest}
        if name == "train":
            record["stats"] = stats.to_dict()
    work.delete_tree("")
    return record | {"counts": counts} | quarantine_record(counts, damaged)


def _adapted_set(run: Run, static: FeatureSet, name: str, target: ObjectStore) -> tuple[ShardIndex, CmvnStats]:
    """Write the adapted features of a set; shards of an earlier attempt are kept."""
    shards = static.index.shards
    common = {
        "source": static.store.url,
        "digest": static.index.digest,
        "target": target.url,
        "align": run.result("align").url,
        "set": name,
    }
    pieces = (common | {"name": piece_name(n), "numbers": n} for n in share_out(len(shards), run.runner))
    done = 0
    for made in map_pieces(run.runner, "tasks.stages.adapt:adapt_piece", pieces, f"adapt {name}"):
        done += made
        progress.report("adapt", done, len(shards), name)
    total = CmvnStats(config_of(run).lda_dim)
    for shard in shards:
        total = sum(read_note(target, shard.name, shard.count).values(), total)
    return stored_index(target, name, [shard.name for shard in shards]), total


def adapt_piece(piece: Piece) -> int:
    """Adapt the features of some shards of a set; returns the number of shards."""
    static, target = opened(piece["source"], piece["digest"]), ObjectStore(piece["target"])
    chain, transforms = _transforms(piece["align"])
    own = {who.removeprefix(f"{piece['set']}/"): one for who, one in transforms.items()}
    shard_of = np.asarray(static.index.column("shard"))
    for number in piece["numbers"]:
        name, rows = static.index.shards[number].name, np.flatnonzero(shard_of == number).tolist()
        if has_note(target, name, len(rows)) and load_part(target, name) is not None:
            continue
        stats = CmvnStats(len(chain.matrix) if chain.matrix is not None else 0)
        write_shard(target, name, _samples(static, rows, chain, own, stats), payload="npy")
        target.write_json(note_name(name), {piece["set"]: stats.to_dict()})
    return len(piece["numbers"])


def _samples(
    static: FeatureSet, rows: list[int], chain: FeatureChain, transforms: Mapping[str, Tensor], stats: CmvnStats
) -> Iterator[Sample]:
    """Yields adapted features of some rows, and adds them to the statistics."""
    for number in rows:
        row = static.index.row(number)
        feats = chain(static.read(number, row["speaker"]), transforms.get(row["speaker"]))
        stats.add(feats)
        yield feature_sample(row, feats)


@lru_cache(maxsize=2)
def _transforms(align: str) -> tuple[FeatureChain, dict[str, Tensor]]:
    """LDA and MLLT, and the transforms by set and speaker; cached for further pieces in this process."""
    output = StageOutput.at(align)
    with tempfile.TemporaryDirectory() as folder:
        model = AlignmentModel.fetch(output, Path(folder)).model
        return model.chain, load_file(output.fetch(_TRANSFORMS, Path(folder)))


ADAPT = Stage("adapt", 1, _inputs, _work, found_whole)
