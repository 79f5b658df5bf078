"""Stage 3, features: statistics for mean and variance normalization and, if asked for, stored feature shards.

Features are computed on the fly on the training device unless `features.stored` is set. Statistics are those of the
training set (`cmvn: global`), or of every speaker of every set (`cmvn: speaker`).
"""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speech.audio import decode_audio
from speech.features import FeatureConfig, build_features
from speech.features.cmvn import CmvnStats
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader
from storage.shards import Sample, ShardPart, build_index, load_part, write_shard
from storage.stages import StageOutput
from tasks import progress
from tasks.prepare import worker_count
from tasks.shard import shard_name
from tasks.stage import Inputs, Run, Stage

_COPIED = ("text", "speaker", "corpus", "domain", "language", "duration", "sample_rate")
SpeakerStats = dict[str, CmvnStats]


class Extractor:
    """Computes one shard's features: statistics always, a feature shard if asked.

    Args:
        cfg: Which features.
        sample_rate: Of the audio, Hz.
    """

    def __init__(self, cfg: FeatureConfig, sample_rate: int) -> None:
        self.cfg = cfg
        self.extract = build_features(cfg, sample_rate)

    @torch.inference_mode()
    def features(self, payload: bytes) -> Tensor:
        """Features [frames, F] of one encoded utterance."""
        wave, _ = decode_audio(payload)
        feats, frames = self.extract(wave[None], torch.tensor([len(wave)]))
        found: Tensor = feats[0, : int(frames[0])]
        return found

    def samples(self, index: ShardIndex, reader: ShardReader, rows: list[int], stats: SpeakerStats) -> Iterator[Sample]:
        """Feature samples of some rows; their statistics are added to `stats` on the way."""
        for i in rows:
            row = index.row(i)
            feats = self.features(reader.payload(i))
            stats.setdefault(row["speaker"], CmvnStats(self.extract.dim)).add(feats)
            data = io.BytesIO()
            np.save(data, feats.numpy(), allow_pickle=False)
            fields = {name: row[name] for name in _COPIED} | {"num_frames": len(feats)}
            yield Sample(id=row["id"], members={"npy": data.getvalue()}, row=fields)


def features_of_set(
    run: Run, name: str, source: ObjectStore, target: ObjectStore
) -> tuple[SpeakerStats, ShardIndex | None, int]:
    """Statistics by speaker of one set, its feature index if features are stored, and its frames."""
    cfg = run.config.features
    index = ShardIndex.read(source)
    reader = ShardReader(source, index, run.cache_folder)
    extractor = Extractor(cfg, run.config.data.sample_rate)
    shard_of = np.asarray(index.column("shard"))

    def work(number: int) -> tuple[SpeakerStats, ShardPart | None]:
        note = f"stats/shard-{number:06d}.json"
        part = load_part(target, shard_name(number)) if cfg.stored else None
        if (part is not None or not cfg.stored) and target.exists(note):
            return {who: CmvnStats.from_dict(value) for who, value in target.read_json(note).items()}, part
        stats: SpeakerStats = {}
        samples = extractor.samples(index, reader, np.flatnonzero(shard_of == number).tolist(), stats)
        if cfg.stored:
            part = write_shard(target, shard_name(number), samples, payload="npy")
        else:
            for _ in samples:
                pass
        target.write_json(note, {who: value.to_dict() for who, value in sorted(stats.items())})
        return stats, part

    total: SpeakerStats = {}
    parts: list[ShardPart] = []
    with ThreadPoolExecutor(worker_count(run.config.storage.workers)) as pool:
        for done, (stats, part) in enumerate(pool.map(work, range(len(index.shards)))):
            for who, value in stats.items():
                total[who] = total[who] + value if who in total else value
            if part is not None:
                parts.append(part)
            progress.report("features", done + 1, len(index.shards), name)
    frames = sum(value.count for value in total.values())
    if not cfg.stored:
        return total, None, frames
    stored = build_index(parts, {"payload": "npy", "set": name})
    stored.write(target)
    return total, stored, frames


def _needed(cfg: FeatureConfig, sets: list[str]) -> list[str]:
    """Sets that have to be looked at."""
    if cfg.stored or cfg.cmvn == "speaker":
        return sets
    return ["train"] if cfg.cmvn == "global" else []


def _inputs(run: Run) -> Inputs:
    config = {"features": run.config.features.model_dump(mode="json"), "sample_rate": run.config.data.sample_rate}
    return config, {name: entry["digest"] for name, entry in run.result("shard").record["sets"].items()}


def _work(run: Run, output: StageOutput) -> dict[str, Any]:
    cfg = run.config.features
    shards = run.result("shard")
    sets: dict[str, Any] = {}
    speakers: dict[str, Any] = {}
    global_stats: dict[str, Any] | None = None
    frames = 0
    for name in _needed(cfg, sorted(shards.record["sets"])):
        stats, index, found = features_of_set(run, name, shards.store.child(name), output.store.child(name))
        frames += found
        if name == "train" and cfg.cmvn == "global":
            global_stats = sum(stats.values(), CmvnStats(next(iter(stats.values())).dim)).to_dict()
        if cfg.cmvn == "speaker":
            speakers |= {who: value.to_dict() for who, value in stats.items()}
        if index is not None:
            sets[name] = {"utterances": len(index), "bytes": sum(s.bytes for s in index.shards), "digest": index.digest}
    counts = {"frames": frames, "dimensions": build_features(cfg, run.config.data.sample_rate).dim}
    if sets:
        counts["stored"] = sum(entry["utterances"] for entry in sets.values())
    return {"counts": counts, "stats": global_stats, "speakers": speakers, "sets": sets}


def set_url(run: Run, name: str) -> str:
    """Store of the shards that training and decoding read: stored features if there are, else audio."""
    stage = "features" if run.config.features.stored else "shard"
    return run.result(stage).store.child(name).url


def set_digest(run: Run, name: str) -> str:
    """Digest of what `set_url` names."""
    stage = "features" if run.config.features.stored else "shard"
    digest: str = run.result(stage).record["sets"][name]["digest"]
    return digest


FEATURES = Stage("features", 1, _inputs, _work)
