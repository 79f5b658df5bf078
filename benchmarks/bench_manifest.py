"""Time and peak memory of each part of the data path for a synthetic manifest of millions of utterances.

    python -m benchmarks.bench_manifest --utterances 10000000 [--json]

Utterances have no audio. Each part runs in a separate process, so that its peak memory can be measured.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage.batching import plan_epoch
from storage.columns import collect_columns
from storage.duplicates import SeenTexts, equal_labels, text_keys
from storage.index import SCHEMA, ShardIndex, ShardRecord
from storage.objects import ObjectStore
from tasks.config.data import DataConfig
from tasks.config.pipeline import parse_config
from tasks.dataset.manifest import MANIFEST, first_of_ids, iter_manifest, write_manifest
from tasks.dataset.sets import assign_sets, values
from tasks.dataset.tables import TableWriter
from tasks.stages.prepare import _SCHEMA
from training.coordinator.epochs import ShardMap
from training.coordinator.ledger import Ledger
from training.coordinator.messages import Lease
from training.coordinator.packing import Rows, pack_rows
from training.coordinator.worklist import Worklist, plan_lease
from training.learner.sampling import Draws, SamplingConfig

CHUNK = 1 << 15
PER_SPEAKER, PER_SHARD = 100, 500


@cache
def texts() -> list[str]:
    """Sentences of ten words."""
    draw = np.random.default_rng(0).integers(0, 5000, (100_000, 10)).tolist()
    return [" ".join(f"word{n}" for n in row) for row in draw]


def made_up(begin: int, count: int) -> pa.RecordBatch:
    """Synthetic rows of a large corpus: 100 utterances per speaker, 5 domains, texts of 10 words."""
    draw = np.random.default_rng(begin)
    number, digests = np.arange(begin, begin + count), draw.bytes(32 * count).hex()
    text = pa.array(texts()).take(pa.array(draw.integers(0, len(texts()), count)))
    columns = {
        "id": [f"corpus-{n:010d}" for n in number],
        "set": [""] * count,
        "audio": [f"/data/corpus/{n // 1000:06d}/{n:010d}.flac" for n in number],
        "text": text,
        "raw_text": text,
        "speaker": [f"speaker{n:07d}" for n in number // PER_SPEAKER],
        "corpus": ["made-up"] * count,
        "domain": [f"domain{n % 5}" for n in number // PER_SPEAKER],
        "language": ["en"] * count,
        "sha256": [digests[n : n + 64] for n in range(0, 64 * count, 64)],
        "start": np.zeros(count),
        "end": [None] * count,
        "duration": draw.gamma(4.0, 2.5, count) + 0.2,
        "channel": [None] * count,
        "sample_rate": [16000] * count,
    }
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in _SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def data(**fields: object) -> DataConfig:
    """A data configuration."""
    sources = [{"kind": "table", "path": "none"}]
    return parse_config({"name": "bench", "data": {"sources": sources} | fields}).data


def write_checked(folder: Path, count: int) -> None:
    """Write the table that results from checking a corpus."""
    with TableWriter(folder / "checked.parquet", _SCHEMA) as table:
        for begin in range(0, count, CHUNK):
            table.add_batch(made_up(begin, min(CHUNK, count - begin)))


def split(folder: Path, count: int, **fields: object) -> None:
    """Split the utterances into sets."""
    sets = assign_sets(folder / "checked.parquet", np.ones(count, dtype=bool), data(**fields), 1)
    np.savez(folder / "sets.npz", codes=sets.codes, names=np.array(sets.names))


def same_audio_and_text(folder: Path, count: int) -> None:
    """Look for equal recordings and texts."""
    checked = folder / "checked.parquet"
    equal_labels(text_keys(values(checked, "sha256")))
    pairs = zip(values(checked, "speaker"), values(checked, "text"), strict=True)
    equal_labels(text_keys(f"{who}\t{text}" for who, text in pairs))


def manifest(folder: Path, count: int) -> None:
    """Write the manifest with its sets."""
    from tasks.dataset.sets import Sets

    saved = np.load(folder / "sets.npz", allow_pickle=False)
    about = write_manifest(
        folder / "checked.parquet", Sets(saved["codes"], saved["names"].tolist()), folder / MANIFEST, _SCHEMA
    )
    assert about["written"] == count


def read_set(folder: Path, count: int) -> None:
    """Stream one set from the manifest."""
    rows = sum(1 for _ in iter_manifest(ObjectStore(folder), folder, "train", ["id", "duration"]))
    assert 0 < rows < count


def rows_of_shards(begin: int, size: int) -> pa.Table:
    """Rows of an index, 500 per shard."""
    number = np.arange(begin, begin + size)
    draw = np.random.default_rng(begin)
    durations = draw.gamma(4.0, 2.5, size) + 0.2
    columns = {
        "id": [f"corpus-{n:010d}" for n in number],
        "shard": number // PER_SHARD,
        "offset": number % PER_SHARD * 200_000,
        "length": draw.integers(100_000, 200_000, size),
        "duration": durations,
        "num_frames": (durations * 16000).astype(np.int64),
        "sample_rate": np.full(size, 16000),
        "text": pa.array(texts()).take(pa.array(draw.integers(0, len(texts()), size))),
        "speaker": [f"speaker{n:07d}" for n in number // PER_SPEAKER],
        "corpus": ["made-up"] * size,
        "domain": [f"domain{min(n % 16, 4)}" for n in number // 100_000],
        "language": ["en"] * size,
    }
    return pa.table([pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA)


def index_write(folder: Path, count: int) -> None:
    """Join the parts of an index shard by shard, validate and write it, as the shard stage does."""
    records: list[ShardRecord] = []

    def parts() -> Iterator[pa.Table]:
        for begin in range(0, count, 100 * PER_SHARD):
            rows = rows_of_shards(begin, min(100 * PER_SHARD, count - begin))
            for start in range(0, len(rows), PER_SHARD):
                part = rows.slice(start, PER_SHARD)
                seconds = float(part.column("duration").to_numpy().sum())
                n = len(records)
                records.append(ShardRecord(f"shard-{n:06d}.tar", len(part), seconds, PER_SHARD * 200_000, f"{n:064x}"))
                yield part

    columns = collect_columns(parts(), SCHEMA)
    ShardIndex(columns, tuple(records), {"payload": "flac", "set": "train"}).write(ObjectStore(folder))


def read_index(folder: Path) -> ShardIndex:
    """Read and validate the index."""
    return ShardIndex.read(ObjectStore(folder))


def index_read(folder: Path, count: int) -> None:
    """Read and validate the index."""
    assert len(read_index(folder)) == count


def index_digest(folder: Path, count: int) -> None:
    """Read the index and compute its digest."""
    assert len(read_index(folder).digest) == 64


def training_columns(folder: Path, count: int) -> None:
    """Load the columns of a training node, and access 1,000 random utterances."""
    index = read_index(folder)
    kept = [index.values(name) for name in ("id", "speaker", "text", "duration", "shard", "offset", "length")]
    for row in np.random.default_rng(0).integers(0, count, 1000).tolist():
        assert all(column[row].as_py() is not None for column in kept)


def plan(folder: Path, count: int) -> None:
    """Read the index and plan the batches of an epoch for a single node."""
    durations = read_index(folder).column("duration")
    batches = plan_epoch(durations, batch_seconds=600, max_batch=64, seed=1, epoch=1)
    assert sum(map(len, batches)) == count


def leases(folder: Path, count: int, nodes: int = 16) -> dict[str, object]:
    """Process an epoch in the coordinator's ledger: leases for 16 nodes, their batches, and reports."""
    index = read_index(folder)
    shards, durations = ShardMap(Draws(index, SamplingConfig(), 1).shard), index.column("duration")
    ledger = Ledger(shards, lambda _, rows: [index.values("id")[row].as_py() for row in rows], 1, 1)
    for node in range(nodes):
        ledger.apply({"event": "join", "node": node, "incarnation": f"n{node}", "endpoints": []})
        ledger.apply({"event": "ready", "incarnation": f"n{node}"})

    def planner(epoch: int, rows: Rows, name: str) -> list[Rows]:
        return [rows[part] for part in plan_epoch(durations[rows], batch_seconds=600, max_batch=64, seed=1, epoch=0)]

    granted, largest, state = 0, 0, 0
    while not ledger.complete:
        for node in range(nodes):
            if ledger.complete:
                break
            lease = ledger.apply({"event": "lease", "epoch": 0, "incarnation": f"n{node}", "live": nodes})
            granted += 1
            packed = pack_rows(lease.rows)
            largest = max(largest, len(packed))
            worklist = Worklist(shards, 1, 1, {})
            packed_lease = Lease(id=str(lease.number), epoch=0, rows=packed)
            worklist.add(plan_lease(planner, packed_lease, len(shards)))
            if granted == nodes:
                state = len(json.dumps(ledger.to_dict()))
            report(ledger, worklist, f"n{node}")
    assert ledger.repeated == 0
    return {"leases": granted, "largest_lease_bytes": largest, "state_bytes": state}


def report(ledger: Ledger, worklist: Worklist, name: str) -> None:
    """Report the batches of a node without training them."""
    sequence = 0
    while (batch := worklist.next()) is not None:
        counts = {"utterances": len(batch.rows), "seconds": 600.0}
        event = {"event": "report", "incarnation": name, "seq": sequence, "epoch": 0, "counts": counts}
        ledger.apply({**event, "rows": pack_rows(batch.rows)})
        sequence += 1


def sampling(folder: Path, count: int) -> dict[str, object]:
    """Draw the utterances of an epoch, sampling domains with a temperature."""
    draws = Draws(read_index(folder), SamplingConfig(kind="temperature", by="domain"), 1)
    rows = draws.rows(0, np.arange(len(draws)))
    assert len(rows) == count
    return {"utterances_drawn": int(np.count_nonzero(np.bincount(rows, minlength=count)))}


def duplicate_ids(folder: Path, count: int) -> None:
    """Detect duplicate ids as a corpus reader does."""
    seen = SeenTexts()
    for n in range(count):
        assert seen.add(f"corpus-{n:010d}")


def ids(folder: Path, count: int) -> None:
    """Find duplicate ids in the table."""
    assert first_of_ids(folder / "checked.parquet").all()


PARTS = {
    "write checked utterances": (write_checked, {}),
    "ids that come twice": (ids, {}),
    "same audio, same text": (same_audio_and_text, {}),
    "split by utterance": (split, {"split_by": "utterance"}),
    "split by speaker, stratified": (split, {"stratify": ("domain", "duration")}),
    "10 folds by speaker": (split, {"folds": 10}),
    "split by speaker": (split, {}),
    "write manifest": (manifest, {}),
    "read one set of it": (read_set, {}),
    "join parts, validate, write index": (index_write, {}),
    "read, validate index": (index_read, {}),
    "digest of the index": (index_digest, {}),
    "columns for a training node": (training_columns, {}),
    "plan an epoch's batches": (plan, {}),
    "leases and reports, 16 nodes": (leases, {}),
    "sampling at a temperature": (sampling, {}),
    "ids of a corpus reader": (duplicate_ids, {}),
}


def _child(name: str, folder: Path, count: int, pipe: Connection) -> None:
    work, fields = PARTS[name]
    started = time.perf_counter()
    about = work(folder, count, **fields) or {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe.send((time.perf_counter() - started, peak / 1024, about))


def measure(name: str, folder: Path, count: int) -> dict[str, object]:
    """Seconds and peak memory (MB, libraries included) of one part."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(name, folder, count, theirs))
    child.start()
    theirs.close()
    try:
        seconds, peak, about = ours.recv()
    except EOFError:
        raise SystemExit(f"{name} failed") from None
    finally:
        child.join()
    return {"part": name, "seconds": round(seconds, 2), "peak_mb": round(peak), **about}


def about(row: dict[str, object]) -> list[str]:
    """Format the further figures of a part."""
    return [f"{name} {value:,}" for name, value in row.items() if name not in ("part", "seconds", "peak_mb")]


def main() -> None:
    """Measure every part and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--utterances", type=int, default=10_000_000)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), help="some parts; later ones need earlier ones")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="starling-manifest-") as folder:
        for name in args.parts:
            row = measure(name, Path(folder), args.utterances)
            rows.append(row)
            if not args.json:
                rate = args.utterances / float(str(row["seconds"]))
                print(
                    f"{name:32} {row['seconds']:8.1f} s {rate:12,.0f} utterances/s {row['peak_mb']:6} MB",
                    *about(row),
                    flush=True,
                )
        if args.json:
            files = {path.name: path.stat().st_size for path in sorted(Path(folder).glob("*.parquet"))}
            print(json.dumps({"utterances": args.utterances, "bytes": files, "parts": rows}, indent=1))


if __name__ == "__main__":
    main()
