"""A manifest of millions of utterances, made up and without audio: seconds and peak memory of each part of the path.

    python -m benchmarks.bench_manifest --utterances 10000000 [--json]

Each part runs in a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage.duplicates import equal_labels, text_keys
from storage.index import SCHEMA, ShardIndex, ShardRecord
from storage.objects import ObjectStore
from tasks.config import DataConfig, parse_config
from tasks.manifest import MANIFEST, first_of_ids, iter_manifest, write_manifest
from tasks.prepare import _SCHEMA
from tasks.sets import assign_sets, values
from tasks.tables import TableWriter

CHUNK = 1 << 15
PER_SPEAKER, PER_SHARD = 100, 500


@cache
def texts() -> list[str]:
    """Sentences of ten words."""
    draw = np.random.default_rng(0).integers(0, 5000, (100_000, 10)).tolist()
    return [" ".join(f"word{n}" for n in row) for row in draw]


def made_up(begin: int, count: int) -> pa.RecordBatch:
    """Rows that look like a large corpus: 100 utterances a speaker, 5 domains, texts of 10 words."""
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


def data(**fields) -> DataConfig:
    """A data configuration."""
    sources = [{"kind": "table", "path": "none"}]
    return parse_config({"name": "bench", "data": {"sources": sources} | fields}).data


def write_checked(folder: Path, count: int) -> None:
    """What checking a corpus writes."""
    with TableWriter(folder / "checked.parquet", _SCHEMA) as table:
        for begin in range(0, count, CHUNK):
            table.add_batch(made_up(begin, min(CHUNK, count - begin)))


def split(folder: Path, count: int, **fields) -> None:
    """Divide into sets."""
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
    from tasks.sets import Sets

    saved = np.load(folder / "sets.npz", allow_pickle=False)
    about = write_manifest(
        folder / "checked.parquet", Sets(saved["codes"], saved["names"].tolist()), folder / MANIFEST, _SCHEMA
    )
    assert about["written"] == count


def read_set(folder: Path, count: int) -> None:
    """Stream one set out of the manifest."""
    found = sum(1 for _ in iter_manifest(ObjectStore(folder), folder, "train", ["id", "duration"]))
    assert 0 < found < count


def build(folder: Path, count: int) -> ShardIndex:
    """An index of all utterances, in order, 500 to a shard."""
    tables, seconds, before = [], np.zeros(0), 0
    for begin in range(0, count, CHUNK):
        size = min(CHUNK, count - begin)
        number = np.arange(begin, begin + size)
        durations = np.random.default_rng(begin).gamma(4.0, 2.5, size) + 0.2
        columns = {
            "id": [f"corpus-{n:010d}" for n in number],
            "shard": number // PER_SHARD,
            "offset": number % PER_SHARD * 200_000,
            "length": np.full(size, 190_000),
            "duration": durations,
            "num_frames": (durations * 16000).astype(np.int64),
            "sample_rate": np.full(size, 16000),
            "text": ["seven words that somebody said once upon"] * size,
            "speaker": [f"speaker{n:07d}" for n in number // PER_SPEAKER],
            "corpus": ["made-up"] * size,
            "domain": [f"domain{n % 5}" for n in number // PER_SPEAKER],
            "language": ["en"] * size,
        }
        tables.append(pa.table([pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA))
        seconds = np.append(seconds, durations)
        before += size
    shard = np.arange(count) // PER_SHARD
    totals, sizes = np.bincount(shard, weights=seconds), np.bincount(shard)
    records = (
        ShardRecord(f"shard-{n:06d}.tar", int(sizes[n]), float(totals[n]), PER_SHARD * 200_000, f"{n:064x}")
        for n in range(len(sizes))
    )
    return ShardIndex(pa.concat_tables(tables), tuple(records), {"payload": "flac", "set": "train"})


def index_write(folder: Path, count: int) -> None:
    """Build, validate and publish an index."""
    build(folder, count).write(ObjectStore(folder))


def index_read(folder: Path, count: int) -> None:
    """Read and validate it."""
    assert len(ShardIndex.read(ObjectStore(folder))) == count


def ids(folder: Path, count: int) -> None:
    """Look for ids that come twice."""
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
    "build, validate, write index": (index_write, {}),
    "read, validate index": (index_read, {}),
}


def _child(name: str, folder: Path, count: int, pipe) -> None:
    work, fields = PARTS[name]
    started = time.perf_counter()
    work(folder, count, **fields)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe.send((time.perf_counter() - started, peak / 1024))


def measure(name: str, folder: Path, count: int) -> dict[str, object]:
    """Seconds and peak memory (MB, libraries included) of one part."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(name, folder, count, theirs))
    child.start()
    theirs.close()
    try:
        seconds, peak = ours.recv()
    except EOFError:
        raise SystemExit(f"{name} failed") from None
    finally:
        child.join()
    return {"part": name, "seconds": round(seconds, 2), "peak_mb": round(peak)}


def main() -> None:
    """Measure every part and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--utterances", type=int, default=10_000_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="starling-manifest-") as folder:
        for name in PARTS:
            row = measure(name, Path(folder), args.utterances)
            rows.append(row)
            if not args.json:
                rate = args.utterances / float(str(row["seconds"]))
                print(f"{name:32} {row['seconds']:8.1f} s {rate:12,.0f} utterances/s {row['peak_mb']:6} MB", flush=True)
        if args.json:
            size = (Path(folder) / MANIFEST).stat().st_size
            print(json.dumps({"utterances": args.utterances, "manifest_bytes": size, "parts": rows}, indent=1))


if __name__ == "__main__":
    main()
