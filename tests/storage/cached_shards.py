"""Small shards of known content, for the tests of the cache."""

import random

from storage.shards import Sample, build_index, write_shard

ROW = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000}


def content(number):
    return random.Random(number).randbytes(40_000)


def fill(store, shards=6):
    parts = [
        write_shard(store, f"{n}.tar", [Sample(f"u{n}", {"flac": content(n)}, ROW)], "flac") for n in range(shards)
    ]
    index = build_index(parts, {})
    index.write(store)
    return index


def bytes_of(folder):
    return sum(path.stat().st_size for path in folder.glob("*.tar"))
