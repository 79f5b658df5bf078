"""Stage 2, shard: pack each set's audio into WebDataset tars of FLAC and JSON, with a Parquet index published last.

Shards are made in parallel, each whole or not at all; a crashed stage continues with the shards that it lacks.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from speech.audio import AudioError, encode_flac, resample
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.shards import Sample, ShardPart, build_index, load_part, write_shard
from storage.stages import StageOutput, digest_json
from tasks import progress
from tasks.audio import load_utterance_audio
from tasks.folds import write_unions
from tasks.prepare import MANIFEST, QuarantineError, read_table, worker_count
from tasks.stage import Inputs, Run, Stage, StageError

Row = dict[str, Any]
_INDEX_FIELDS = ("text", "speaker", "corpus", "domain", "language")


def plan_shards(rows: list[Row], shard_seconds: float, seed: int) -> list[list[Row]]:
    """Cut a set into shards of about `shard_seconds`, utterances mixed by a hash: each shard has many speakers."""
    ordered = sorted(rows, key=lambda row: digest_json([seed, row["id"]]))
    shards: list[list[Row]] = []
    seconds = shard_seconds
    for row in ordered:
        if seconds >= shard_seconds:
            shards.append([])
            seconds = 0.0
        shards[-1].append(row)
        seconds += row["duration"]
    return shards


def make_sample(row: Row, sample_rate: int) -> Sample:
    """Decode, bring to the rate, and encode one utterance.

    Raises:
        AudioError: If the audio cannot be read any more.
    """
    wave, rate = load_utterance_audio(row)
    wave = resample(wave, rate, sample_rate)
    fields = {name: row[name] for name in _INDEX_FIELDS}
    fields |= {"duration": len(wave) / sample_rate, "num_frames": len(wave), "sample_rate": sample_rate}
    return Sample(id=row["id"], members={"flac": encode_flac(wave, sample_rate)}, row=fields)


def shard_name(number: int) -> str:
    """Name of a shard inside its set's folder."""
    return f"shard-{number:06d}.tar"


def write_one(store: ObjectStore, number: int, rows: list[Row], sample_rate: int) -> tuple[ShardPart, list[Row]]:
    """Write a shard, or take it over if it is there.

    Returns:
        The shard, and what could not be read any more: id, reason, detail.
    """
    name, note = shard_name(number), f"quarantine/shard-{number:06d}.json"
    part = load_part(store, name)
    if part is not None:
        return part, store.read_json(note) if store.exists(note) else []
    bad: list[Row] = []

    def samples() -> Iterator[Sample]:
        for row in rows:
            try:
                yield make_sample(row, sample_rate)
            except AudioError as error:
                bad.append({"id": row["id"], "reason": error.reason, "detail": str(error)})
        # here, before the shard is complete: a shard that exists is not made again
        if bad:
            store.write_json(note, bad)
        else:
            store.delete(note)  # a former attempt may have left one

    return write_shard(store, name, samples(), payload="flac"), bad


def shard_set(store: ObjectStore, rows: list[Row], run: Run, name: str) -> tuple[ShardIndex, list[Row]]:
    """Write all shards of a set in threads, then its index."""
    plan = plan_shards(rows, run.config.storage.shard_seconds, run.config.seed)
    rate = run.config.data.sample_rate
    parts: list[ShardPart] = []
    bad: list[Row] = []
    with ThreadPoolExecutor(worker_count(run.config.storage.workers)) as pool:
        jobs = [pool.submit(write_one, store, number, chunk, rate) for number, chunk in enumerate(plan)]
        for done, job in enumerate(jobs):
            part, missing = job.result()
            parts.append(part)
            bad += missing
            progress.report("shard", done + 1, len(jobs), name)
    index = build_index(parts, {"payload": "flac", "set": name})
    index.write(store)
    return index, bad


def _inputs(run: Run) -> Inputs:
    config = {
        "sample_rate": run.config.data.sample_rate,
        "shard_seconds": run.config.storage.shard_seconds,
        "seed": run.config.seed,
        "max_quarantined": run.config.data.max_quarantined,
    }
    return config, {"prepare": run.result("prepare").record["digest"]}


def _work(run: Run, output: StageOutput) -> dict[str, Any]:
    by_set: dict[str, list[Row]] = {}
    for row in read_table(run.result("prepare").store, MANIFEST):
        by_set.setdefault(row["set"], []).append(row)
    folds = run.config.data.folds
    if "train" not in by_set and not folds:
        raise StageError(f"there is no training set, only {', '.join(sorted(by_set))}: look at data.sources.*.set")
    sets: dict[str, Any] = {}
    quarantined: list[Row] = []
    for name in sorted(by_set):
        index, bad = shard_set(output.store.child(name), by_set[name], run, name)
        quarantined += bad
        sets[name] = {
            "utterances": len(index),
            "shards": len(index.shards),
            "seconds": index.seconds,
            "bytes": sum(shard.bytes for shard in index.shards),
            "digest": index.digest,
        }
    read = sum(len(rows) for rows in by_set.values())
    if len(quarantined) > run.config.data.max_quarantined * read:
        raise QuarantineError(
            f"{len(quarantined)} of {read} utterances could be read by the prepare stage but not any more; the first: "
            f"{quarantined[0]['detail']}. Is the corpus still there? Then run again with --from prepare."
        )
    return {
        "counts": {
            "read": read,
            "written": read - len(quarantined),
            "quarantined": len(quarantined),
            "shards": sum(entry["shards"] for entry in sets.values()),
        },
        "sets": sets,
        "unions": write_unions(output.store, folds) if folds else {},
        "quarantined": quarantined,
    }


SHARD = Stage("shard", 1, _inputs, _work)
