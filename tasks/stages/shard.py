"""Stage shard: pack each set's audio into WebDataset tars of FLAC and JSON, with a Parquet index published last.

Shards are written in parallel, each of them atomically; a crashed stage continues with the missing shards. FLAC that
needs no change is copied; everything else is decoded, resampled and encoded. The training set has copies of its
utterances at the speeds of `data.speeds`, and the pauses of `data.pauses`.

So the stage `prepare` decodes audio once, and this one again unless it copies it. For 300 utterances of LibriSpeech at
16 kHz, this second decoding is nothing of FLAC, and 22 % (MP3), 26 % (Vorbis) and 39 % (Opus) of the CPU time of both
stages: 1, 2 and 13 s for an hour of speech. Shards that `prepare` wrote would save it, but an utterance's set, and
whether it is a duplicate, is known only when all have been read; samples kept until then would take 115 MB for an hour.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from configurable.addresses import address_content
from speech.audio import AudioError, encode_flac, resample
from speech.features.augment import PauseConfig
from storage.disks import free_bytes, size_text
from storage.index import ShardIndex
from storage.intact import DamagedObjectError, readable
from storage.objects import ObjectMissingError, ObjectStore
from storage.shards import Sample, ShardPart, build_index, load_part, shard_name, write_shard
from storage.stages import StageOutput
from tasks.config.home import work_folder
from tasks.dataset.audio import load_utterance_audio, untouched_flac
from tasks.dataset.manifest import MANIFEST, scratch_folder
from tasks.dataset.pauses import ShardPauses
from tasks.dataset.speeds import SPEED, is_copy, with_copies
from tasks.dataset.splits import TRAIN
from tasks.dataset.tables import TableWriter, batches
from tasks.stages import progress
from tasks.stages.base import Inputs, Run, Stage, StageError, StageRecord
from tasks.stages.folds import train_folder, write_unions
from tasks.stages.prepare import PREPARE
from tasks.stages.quarantined import QuarantineError
from tasks.stages.runner import Piece, map_pieces, piece_name, share_out

_log = logging.getLogger(__name__)
Row = dict[str, Any]
Ints = NDArray[np.int64]
_INDEX_FIELDS = ("text", "speaker", "corpus", "domain", "language")
_DATA = ("sample_rate", "max_quarantined", "speeds", "lone_copies", "pauses")
"""Fields of `data` that affect the output beside the utterances."""
_CHANGED_S = 0.05
"""Seconds by which another version of a decoder may differ."""
_PARTITION_ROWS = 200_000
"""Utterances sorted in memory at once."""
_SAMPLE_BYTES = 2
"""Bytes per sample before FLAC compression."""


def plan_shards(ids: Iterable[str], durations: Iterable[float], shard_seconds: float, seed: int) -> tuple[Ints, Ints]:
    """Divide a set into shards of about `shard_seconds`, ordered by a hash so that each shard has many speakers.

    Args:
        ids: Utterance ids.
        durations: Their durations in seconds.
        shard_seconds: A shard is filled with utterances until it has this much audio.
        seed: Seed of the order.

    Returns:
        The rows in shard order [num_utterances], and the offsets of the shards in it [num_shards + 1].
    """
    keys = np.fromiter((_hash(seed, name) for name in ids), dtype=np.uint64)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    starts: list[int] = []
    seconds = shard_seconds
    for place, duration in enumerate(np.fromiter(durations, dtype=np.float64)[order].tolist()):
        if seconds >= shard_seconds:
            starts.append(place)
            seconds = 0.0
        seconds += duration
    return order, np.array([*starts, len(order)], dtype=np.int64)


def _hash(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big")


def make_sample(row: Row, sample_rate: int, pauses: ShardPauses | None = None) -> Sample:
    """One utterance as FLAC at a sample rate; the file's own bytes if they are just that.

    Args:
        row: The manifest's, with the `speed` at which the utterance is played if that is not its own.
        sample_rate: Hz.
        pauses: What is put around some utterances.

    Raises:
        AudioError: If the audio can no longer be read.
    """
    speed = row.get(SPEED, 1.0)
    paused = pauses is not None and pauses.wanted(row["id"])
    stored = untouched_flac(row, sample_rate) if speed == 1.0 and not paused else None
    if stored is not None:
        flac, samples = stored
    else:
        wave, rate = load_utterance_audio(row)
        _check_unchanged(row, len(wave) / rate, row["duration"] * speed)
        wave = resample(wave, round(rate * speed), sample_rate)
        if pauses is not None and paused:
            wave = pauses.around(wave, row["id"])
        flac, samples = encode_flac(wave, sample_rate), len(wave)
    fields = {name: row[name] for name in _INDEX_FIELDS}
    fields |= {"duration": samples / sample_rate, "num_frames": samples, "sample_rate": sample_rate}
    return Sample(id=row["id"], members={"flac": flac}, row=fields)


def _check_unchanged(row: Row, seconds: float, prepared: float) -> None:
    """Check that a recording is as long as when it was prepared: its transcript may be of another one.

    Raises:
        AudioError: If it is not.
    """
    if abs(seconds - prepared) > _CHANGED_S:
        raise AudioError(
            f"{row['audio']} has changed since it was prepared: {seconds:.3f} s instead of {prepared:.3f} s; run with "
            "--from prepare",
            "unreadable",
        )


def _note(number: int) -> str:
    return f"quarantine/shard-{number:06d}.json"


def _has_note(store: ObjectStore, number: int, lost: int) -> bool:
    """Whether a shard's note lists the expected number of lost utterances; False for a damaged one."""
    try:
        return not lost or len(store.read_json(_note(number))) == lost
    except (ObjectMissingError, DamagedObjectError, TypeError):
        return False


def write_one(
    store: ObjectStore, number: int, rows: list[Row], sample_rate: int, pauses: ShardPauses | None = None
) -> None:
    """Write a shard unless it exists; utterances that can no longer be read are listed in a note beside it."""
    name, note = shard_name(number), _note(number)
    part = load_part(store, name)
    if part is not None and _has_note(store, number, len(rows) - len(part.rows)):
        return
    bad: list[Row] = []

    def samples() -> Iterator[Sample]:
        for row in rows:
            try:
                yield make_sample(row, sample_rate, pauses)
            except AudioError as error:
                bad.append({"id": row["id"], "reason": error.reason, "detail": str(error)})
        # before the shard is complete: an existing shard is not written again
        if bad:
            store.write_json(note, bad)
        else:
            store.delete(note)  # an earlier attempt may have left one

    write_shard(store, name, samples(), payload="flac")


def shard_piece(piece: Piece) -> int:
    """Write some shards of a set; returns their number."""
    store, rate = ObjectStore(piece["store"]), piece["sample_rate"]
    pauses = ShardPauses(PauseConfig(**piece["pauses"]), rate, piece["seed"]) if "pauses" in piece else None
    for number, rows in piece["shards"]:
        write_one(store, number, rows, rate, pauses)
    return len(piece["shards"])


def shard_rows(
    manifest: Path, name: str, order: Ints, starts: Ints, folder: Path, speeds: Sequence[float] = (), lone: float = 0.0
) -> Iterator[tuple[int, list[Row]]]:
    """The rows of each shard of a set, in order; keeps only a part of a large set in memory.

    Args:
        manifest: The manifest's local file.
        name: The set.
        order: Rows in shard order, as returned by `plan_shards`.
        starts: Offsets of the shards, as returned by `plan_shards`.
        folder: Folder for temporary files.
        speeds: Speeds of the copies in the set.
        lone: Share of them with a speaker of their own.
    """
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    # a partition consists of consecutive whole shards
    edges = [0, *starts[1:-1][np.diff(starts[1:] // _PARTITION_ROWS) > 0].tolist(), len(order)]
    partition_of = np.searchsorted(edges, place, side="right") - 1
    files = [folder / f"{name}-{number}.parquet" for number in range(len(edges) - 1)]
    with readable(str(manifest)):
        schema = pq.read_schema(manifest).append(pa.field(SPEED, pa.float64()))
    writers = [TableWriter(file, schema) for file in files]
    begin = 0
    for batch in with_copies(manifest, name, speeds, lone):
        parts = partition_of[begin : begin + batch.num_rows]
        begin += batch.num_rows
        for number in np.unique(parts).tolist():
            writers[number].add_batch(batch.filter(pa.array(parts == number)))
    for number, (file, writer) in enumerate(zip(files, writers, strict=True)):
        writer.close()
        rows = [row for batch in batches(file) for row in batch.to_pylist()]
        file.unlink()
        ordered = [rows[i] for i in np.argsort(place[partition_of == number], kind="stable").tolist()]
        first, last = edges[number], edges[number + 1]
        for shard in np.flatnonzero((starts[:-1] >= first) & (starts[:-1] < last)).tolist():
            yield shard, ordered[starts[shard] - first : starts[shard + 1] - first]


def _pieces(
    store: ObjectStore, rows: Iterator[tuple[int, list[Row]]], count: int, run: Run, pauses: PauseConfig | None
) -> Iterator[Piece]:
    common = {"pauses": pauses.model_dump(mode="json"), "seed": run.config.seed} if pauses is not None else {}
    for numbers in share_out(count, run.runner):
        yield {
            "name": piece_name(numbers),
            "store": store.url,
            "sample_rate": run.config.data.sample_rate,
            "shards": list(islice(rows, len(numbers))),
            **common,
        }


def shard_set(
    store: ObjectStore, run: Run, name: str, manifest: Path, folder: Path, parts: progress.Parts
) -> tuple[ShardIndex, list[Row]]:
    """Write all shards of a set, then its index.

    Args:
        store: Store of the set.
        run: The pipeline's run.
        name: The set.
        manifest: The manifest's local file.
        folder: Folder for temporary files.

    Returns:
        The index, and the utterances that could no longer be read: id, reason, detail.
    """
    data = run.config.data
    speeds, pauses = (data.speeds, data.pauses) if name == TRAIN else ((), None)
    ids, durations = (
        chain.from_iterable(
            batch.column(0).to_pylist() for batch in with_copies(manifest, name, speeds, columns=[column])
        )
        for column in ("id", "duration")
    )
    order, starts = plan_shards(ids, durations, run.config.storage.shard_seconds, run.config.seed)
    count = len(starts) - 1
    rows = shard_rows(manifest, name, order, starts, folder, speeds, data.lone_copies)
    pieces = _pieces(store, rows, count, run, pauses)
    done = 0
    for made in map_pieces(run.runner, "tasks.stages.shard:shard_piece", pieces, f"shard {name}"):
        done += made
        parts.report(name, done, count)
    index = build_index((_made(store, number) for number in range(count)), {"payload": "flac", "set": name})
    index.write(store)
    notes = sorted(note for note in store.list("quarantine"))
    return index, [entry for note in notes for entry in store.read_json(note)]


def _made(store: ObjectStore, number: int) -> ShardPart:
    part = load_part(store, shard_name(number))
    if part is None:
        raise StageError(f"{store.join(shard_name(number))} has disappeared since it was written: run again")
    return part


def warn_of_room(store: ObjectStore, seconds: float, rate: int) -> None:
    """Warn before hours of work if the shards may not fit on their disk, by the size of uncompressed audio.

    Args:
        store: Store of the shards.
        seconds: Duration of all sets.
        rate: Sample rate, Hz.
    """
    folder = store.local_path("index.parquet")
    if folder is None:
        return
    most = int(seconds * rate * _SAMPLE_BYTES)
    there = sum(entry.size for entry in store.entries())  # shards of an earlier attempt
    if free_bytes(folder) + there < most:
        _log.warning(
            "the shards may not fit: %s are free on the disk of %s; as FLAC they usually need about half of %s, and at"
            " most that. If the disk fills up, finished shards are kept.",
            size_text(free_bytes(folder)),
            folder.parent,
            size_text(most),
        )


def _inputs(run: Run) -> Inputs:
    config = {
        "data": address_content(run.config.data, only=_DATA),
        "storage": address_content(run.config.storage, only=("shard_seconds",)),
        "seed": run.config.seed,
    }
    return config, {"prepare": PREPARE.record(run)["digest"]}


class ShardedSet(TypedDict):
    """A set of shards."""

    utterances: int
    """Their number."""
    shards: int
    """Their number."""
    seconds: float
    """Of audio."""
    bytes: int
    """Of all shards."""
    digest: str
    """Of the index."""


class ShardsRecord(StageRecord):
    """The sets, and what is not in them."""

    sets: dict[str, ShardedSet]
    """Those with shards of their own."""
    unions: dict[str, dict[str, Any]]
    """Number of utterances and shards, and digest, of the indexes over all folds but one."""
    quarantined: list[Row]
    """Utterances that could be read when they were prepared, and no longer."""


def _work(run: Run, output: StageOutput) -> ShardsRecord:
    prepared = PREPARE.record(run)["sets"]
    folds = run.config.data.folds
    speeds = run.config.data.speeds
    seconds = sum(entry["seconds"] for entry in prepared.values())
    seconds += sum(prepared[TRAIN]["seconds"] / speed for speed in speeds)
    warn_of_room(output.store, seconds, run.config.data.sample_rate)
    sizes = {name: prepared[name]["utterances"] * (1 + len(speeds) * (name == TRAIN)) for name in sorted(prepared)}
    parts = progress.Parts("shard", sizes)
    sets: dict[str, ShardedSet] = {}
    quarantined: list[Row] = []
    with scratch_folder(work_folder("shard", output.key)) as folder:
        manifest = run.result("prepare").output.fetch(MANIFEST, folder)
        for name in sorted(prepared):
            index, bad = shard_set(output.store.child(name), run, name, manifest, folder, parts)
            quarantined += bad
            sets[name] = {
                "utterances": len(index),
                "shards": len(index.shards),
                "seconds": index.seconds,
                "bytes": sum(shard.bytes for shard in index.shards),
                "digest": index.digest,
            }
    read = sum(entry["utterances"] for entry in prepared.values())
    copies = len(speeds) * prepared[TRAIN]["utterances"] if speeds else 0
    if len(quarantined) > run.config.data.max_quarantined * (read + copies):
        raise QuarantineError(
            f"{len(quarantined)} of {read + copies} utterances can no longer be read, although the prepare stage has "
            f"read them; the first: {quarantined[0]['detail']}. Check that the corpus is unchanged, or run with --from "
            "prepare."
        )
    return {
        "counts": {
            "read": read,
            **({"copies": copies} if speeds else {}),
            "written": read + copies - len(quarantined),
            "quarantined": len(quarantined),
            "shards": sum(entry["shards"] for entry in sets.values()),
        },
        "sets": sets,
        "unions": write_unions(output.store, folds) if folds else {},
        "quarantined": quarantined,
    }


SHARD = Stage(
    "shard",
    3,
    _inputs,
    _work,
    pieces="",
    evaluates=True,
    reads="utterances",
    writes="per set: `shard-*.tar` (FLAC and JSON, WebDataset's convention), `index.parquet`",
)


def set_texts(run: Run, name: str) -> Iterator[str]:
    """Yields the transcripts of a set, not those of copies; those of `train` are the ones that this run trains on."""
    folder = train_folder(run.config.data) if name == TRAIN else name
    for batch in ShardIndex.read(run.result("shard").store.child(folder)).batches(["id", "text"]):
        for utterance, text in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if not is_copy(utterance, run.config.data.speeds):
                yield text
