"""The cache of remote shards, shared by several processes, some of which are killed."""

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cached_shards import bytes_of, content, fill
from forks import Forkable

from storage.cache import ShardCache
from storage.objects import ObjectStore
from storage.reading import ShardReader

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import random, sys, time
from pathlib import Path
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader

class Remote(ObjectStore):
    def local_path(self, name):
        return None

folder, cache, limit, seed, reads, seconds = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
store = Remote(folder)
reader = ShardReader(store, ShardIndex.read(ObjectStore(folder)), cache, limit)
print("ready", flush=True)
source, end, done = random.Random(seed), time.monotonic() + seconds, 0
while done < reads or time.monotonic() < end:
    position = source.randrange(len(reader))
    assert reader.payload(position) == random.Random(position).randbytes(40_000)
    done += 1
print(done)
"""
"""Reads at random; a folder of this machine stands for a remote store, since that is faster than any server."""


def start_worker(folder, cache, limit, seed, reads, seconds=0):
    command = [sys.executable, "-c", Forkable(WORKER), *map(str, (folder, cache, limit, seed, reads, seconds))]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(workers):
    """How many payloads each process has read."""
    counts = []
    for worker in workers:
        said, errors = worker.communicate(timeout=600)
        assert worker.returncode == 0, errors[-2000:]
        counts.append(int(said.split()[-1]))
    return counts


def test_processes_share_a_small_cache_although_one_is_killed(tmp_path):
    folder, cache = tmp_path / "store", tmp_path / "cache"
    index = fill(ObjectStore(folder), shards=8)
    limit = 3 * index.shards[0].bytes
    workers = [start_worker(folder, cache, limit, seed, 25) for seed in range(2)]
    victim = start_worker(folder, cache, limit, 9, 10**6)
    victim.stdout.readline()
    time.sleep(0.5)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert finish(workers) == [25, 25]
    assert bytes_of(cache) <= limit
    ShardCache(cache).sweep(min_age_s=0.0)
    assert all(path.suffix == ".tar" for path in cache.iterdir())


@pytest.mark.parametrize("shards_of_room", [0, 2])
def test_many_readers_of_a_tiny_cache_get_every_payload(tmp_path, shards_of_room):
    """Each shard is evicted again and again between the moment it was found and the moment it is read."""
    store = ObjectStore(f"memory://cache-{random.getrandbits(60):x}")
    index, wrong = fill(store, shards=4), []

    def work(seed):
        reader = ShardReader(store, index, tmp_path, max(1, shards_of_room * index.shards[0].bytes))
        for position in random.Random(seed).choices(range(4), k=40):
            try:
                wrong.extend([position] if reader.payload(position) != content(position) else [])
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("shards_of_room", [0, 3])
def test_six_processes_read_for_minutes_from_a_tiny_cache(tmp_path, shards_of_room):
    folder, cache = tmp_path / "store", tmp_path / "cache"
    index = fill(ObjectStore(folder), shards=8)
    limit = max(1, shards_of_room * index.shards[0].bytes)
    counts = finish([start_worker(folder, cache, limit, seed, 10, seconds=75) for seed in range(6)])
    assert min(counts) >= 10
