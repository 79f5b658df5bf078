"""Sharding FLAC files: our deterministic, hashed, indexed shards, lhotse's Shar export and webdataset.TarWriter.

    python -m benchmarks.bench_sharding [--json] [--copies 10]

One core, the same real FLAC files for all, read from the page cache and written to a local disk. Rates are hours of
audio per minute of one core. "re-encoding" applies if audio is resampled or a segment is cut; otherwise FLAC data is
copied.
"""

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import webdataset

from benchmarks.common import compare
from speech.audio import encode_flac
from storage.objects import ObjectStore
from storage.shards import Sample, ShardPart, build_index, write_shard
from tasks.dataset.audio import load_utterance_audio
from tasks.stages.shard import make_sample

RATE, PER_SHARD = 16000, 50
OURS = "starling"
Row = dict[str, Any]


def real_rows(copies: int) -> list[Row]:
    """Manifest rows of the FLAC files of LibriSpeech dev-clean-5, repeated under different names."""
    import soundfile

    folder = Path(os.environ.get("STARLING_SHARED_DATA", "../shared/data")) / "LibriSpeech" / "dev-clean-5"
    files = [(path, soundfile.info(str(path))) for path in sorted(folder.rglob("*.flac"))]
    if not files:
        raise SystemExit(f"no FLAC files below {folder}: set STARLING_SHARED_DATA to the folder of real speech")
    fixed = {"start": 0.0, "end": None, "channel": None, "text": "a b c", "corpus": "librispeech"}
    fixed |= {"domain": "read", "language": "en", "offset": None, "length": None}
    return [
        {
            "id": f"{path.stem}-{copy}",
            "audio": str(path),
            "speaker": path.parent.parent.name,
            "duration": info.frames / info.samplerate,
            "sample_rate": info.samplerate,
            **fixed,
        }
        for copy in range(copies)
        for path, info in files
    ]


def as_stored(row: Row) -> Sample:
    """Make a sample like the shard stage."""
    return make_sample(row, RATE)


def with_starling(rows: list[Row], folder: Path, sample: Callable[[Row], Sample] = as_stored) -> None:
    """Write shards, parts and index like the shard stage."""
    store = ObjectStore(folder)

    def write(start: int) -> ShardPart:
        return write_shard(store, f"{start:06d}.tar", map(sample, rows[start : start + PER_SHARD]), "flac")

    # two threads on the one core, as in the stage: one packs while the other waits for the disk
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(write, range(0, len(rows), PER_SHARD)))
    build_index(parts, {}).write(store)


def re_encoded(row: Row) -> Sample:
    """Make a sample whose audio is decoded and re-encoded."""
    wave, rate = load_utterance_audio(row)
    fields = {name: row[name] for name in ("text", "speaker", "corpus", "domain", "language")}
    fields |= {"duration": len(wave) / rate, "num_frames": len(wave), "sample_rate": rate}
    return Sample(row["id"], {"flac": encode_flac(wave, rate)}, fields)


def with_tar_writer(rows: list[Row], folder: Path) -> None:
    """Write files and fields with plain webdataset."""

    def write(start: int) -> None:
        with webdataset.TarWriter(f"{folder}/{start:06d}.tar") as tar:
            for row in rows[start : start + PER_SHARD]:
                fields = {name: row[name] for name in ("id", "text", "speaker", "duration")}
                tar.write({"__key__": row["id"], "flac": Path(row["audio"]).read_bytes(), "json": fields})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(0, len(rows), PER_SHARD)))


def hashed_and_synced(rows: list[Row], folder: Path) -> None:
    """The same with our guarantees: computes every tar's SHA-256 and syncs it to disk."""
    with_tar_writer(rows, folder)
    for tar in folder.glob("*.tar"):
        with tar.open("rb") as file:
            hashlib.file_digest(file, "sha256")
            os.fsync(file.fileno())


def in_a_folder(work: Callable[[Path], object]) -> None:
    """Run with a temporary folder for the shards."""
    with tempfile.TemporaryDirectory() as folder:
        work(Path(folder))


def lhotse_cuts(rows: list[Row]) -> Any:
    """The same utterances as lhotse cuts, created outside the measurement."""
    import lhotse

    cuts = []
    for row in rows:
        recording = lhotse.Recording.from_file(row["audio"], recording_id=row["id"])
        cut = recording.to_cut()
        segment = lhotse.SupervisionSegment(row["id"], row["id"], 0.0, recording.duration, text=row["text"])
        cut.supervisions = [segment]
        cuts.append(cut)
    return lhotse.CutSet.from_cuts(cuts)


def rivals(rows: list[Row]) -> dict[str, Callable[[], object]]:
    """Alternative ways to write the same shards."""
    writers: dict[str, Callable[[], object]] = {
        OURS: lambda: in_a_folder(lambda folder: with_starling(rows, folder)),
        "starling, re-encoding": lambda: in_a_folder(lambda folder: with_starling(rows, folder, re_encoded)),
        "webdataset.TarWriter": lambda: in_a_folder(lambda folder: with_tar_writer(rows, folder)),
        "TarWriter, hashed, synced": lambda: in_a_folder(lambda folder: hashed_and_synced(rows, folder)),
    }
    try:
        cuts = lhotse_cuts(rows)
        writers["lhotse Shar"] = lambda: in_a_folder(
            lambda folder: cuts.to_shar(folder, fields={"recording": "flac"}, shard_size=PER_SHARD)
        )
    except ImportError:
        print("lhotse is not installed: pip install lhotse")
    return writers


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--copies", type=int, default=4)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    rows = real_rows(options.copies)
    hours = sum(row["duration"] for row in rows) / 3600
    seconds = compare(rivals(rows))
    table = [
        {"name": name, "hours_per_core_minute": 60 * hours / value, "times_slower": value / seconds[OURS]}
        for name, value in seconds.items()
    ]
    if options.json:
        print(json.dumps({"benchmark": "sharding", "hours": hours, "rows": table}))
        return
    print(f"sharding {hours:.2f} hours of FLAC, one core, medians of 5")
    for row in table:
        print(f"  {row['name']:28} {row['hours_per_core_minute']:8.1f} h/min   {row['times_slower']:6.2f} x our time")


if __name__ == "__main__":
    main()
