"""Reading utterances from our indexed shards, with webdataset, plain tarfile, and single files (warm page cache)."""

import os
import tarfile
import tempfile
from pathlib import Path

os.environ["WDS_SECURE"] = "1"

import numpy as np
import webdataset

from benchmarks.common import compare, show
from storage.objects import ObjectStore
from storage.reading import ShardReader
from storage.shards import Sample, build_index, write_shard

COUNT, SIZE = 2000, 120_000


def main() -> None:
    """Run and print."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        store = ObjectStore(folder)
        row = {"duration": 10.0, "num_frames": 160_000, "sample_rate": 16000}
        blobs = {f"utt{i:05d}": rng.bytes(SIZE) for i in range(COUNT)}
        samples = (Sample(id=name, members={"flac": data}, row=row) for name, data in blobs.items())
        index = build_index([write_shard(store, "shard-000000.tar", samples, "flac")], {})
        single = Path(folder) / "single"
        single.mkdir()
        for name, data in blobs.items():
            (single / name).write_bytes(data)
        reader = ShardReader(store, index)
        tar = str(Path(folder) / "shard-000000.tar")

        def plain() -> None:
            with tarfile.open(tar) as file:
                for member in file:
                    stream = file.extractfile(member)
                    assert stream is not None
                    stream.read()

        rivals = {
            "starling, indexed, verified once": lambda: [reader.payload(i) for i in range(COUNT)],
            "webdataset": lambda: list(webdataset.WebDataset(tar, shardshuffle=False)),
            "tarfile": plain,
            "single files": lambda: [(single / name).read_bytes() for name in blobs],
        }
        megabytes = COUNT * SIZE / 1e6
        show("reading utterances", compare(rivals), "starling, indexed, verified once", "MB / s", megabytes)


if __name__ == "__main__":
    main()
