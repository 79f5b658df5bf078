"""kill -9 of a process that writes shards, at many moments, then a resume: the bytes of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forks import Forkable

from storage.index import ShardIndex
from storage.objects import ObjectMissingError, ObjectStore
from storage.reading import ShardReader
from storage.safety import check_tar
from storage.stages import StageOutput

WRITER = """
import random, sys, time
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, load_part, write_shard
from storage.stages import StageOutput

folder, pause, last = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
output = StageOutput(ObjectStore(folder), "shard", "cafe")

def samples(shard):
    source = random.Random(shard)
    for number in range(10):
        time.sleep(pause)
        row = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000, "text": f"number {number}"}
        yield Sample(f"u{shard}-{number}", {"flac": source.randbytes(20_000)}, row)

parts = []
for shard in range(6):
    name = f"{shard:06d}.tar"
    part = load_part(output.store, name)
    print("kept" if part else "write", name, flush=True)
    if shard > last:
        time.sleep(600)
    parts.append(part or write_shard(output.store, name, samples(shard), "flac"))
index = build_index(parts, {})
index.write(output.store)
output.publish({"digest": index.digest})
print("done", flush=True)
"""


def run(folder, pause=0.0, last=5, **options):
    """Start the writer, which stops after a shard."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", Forkable(WRITER), str(folder), str(pause), str(last)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def contents(folder):
    store = ObjectStore(folder)
    return {name: store.read(name) for name in store.list()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    process = run(folder)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert output.endswith("done\n")
    return contents(folder)


def assert_nothing_is_half_published(folder):
    output = StageOutput(ObjectStore(folder), "shard", "cafe")
    assert output.record() is None
    with pytest.raises(ObjectMissingError):
        ShardIndex.read(output.store)
    for name in output.store.list():
        if name.endswith(".tar"):
            check_tar(output.store.local_path(name))
        else:
            assert output.store.read_json(name)["record"]["count"] == 10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.variants(1)
def test_killed_writer_resumes_to_the_same_bytes(tmp_path, undisturbed, seed):
    kept = 0
    for kill in range(2):
        wanted = 2 * (kill + 1)
        process = run(tmp_path, pause=0.004, last=wanted)
        for line in process.stdout:  # wait until it is writing some shard, then kill it within that shard
            if line.startswith(f"write {wanted:06d}"):
                break
        time.sleep(random.Random(10 * seed + kill).uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=240)
        assert process.returncode == -signal.SIGKILL
        assert_nothing_is_half_published(tmp_path)
    process = run(tmp_path)
    output, _ = process.communicate(timeout=240)
    kept = output.count("kept")
    assert process.returncode == 0
    assert kept >= 4
    assert contents(tmp_path) == undisturbed
    output_store = StageOutput(ObjectStore(tmp_path), "shard", "cafe").store
    reader = ShardReader(output_store, ShardIndex.read(output_store))
    assert reader.payload(59)[:4] == random.Random(5).randbytes(200_000)[180_000:180_004]
