"""The cache of remote shards: bounded, shared between processes, cleaned of what killed ones left."""

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage.cache import DEFAULT_BYTES, DamagedCopyError, ShardCache, set_cache_limit
from storage.index import ShardIndex
from storage.locks import LockTimeoutError, file_lock, is_locked, passing_lock
from storage.objects import ObjectStore, ObjectStoreError
from storage.reading import ShardError, ShardReader
from storage.shards import Sample, build_index, write_shard

ROW = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000}
ROOT = Path(__file__).resolve().parents[2]


def content(number):
    return random.Random(number).randbytes(40_000)


def fill(store, shards=6):
    parts = [
        write_shard(store, f"{n}.tar", [Sample(f"u{n}", {"flac": content(n)}, ROW)], "flac") for n in range(shards)
    ]
    index = build_index(parts, {})
    index.write(store)
    return index


@pytest.fixture
def store():
    return ObjectStore(f"memory://cache-{random.getrandbits(60):x}")


def bytes_of(folder):
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


def age(path, seconds):
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))


def test_the_least_recently_used_copies_leave_first(store, tmp_path):
    index = fill(store)
    limit = 3 * index.shards[0].bytes + 100
    reader = ShardReader(store, index, tmp_path, cache_bytes=limit)
    for shard in range(3):
        age(reader.shard_path(shard), 1000 - 100 * shard)
    ShardReader(store, index, tmp_path).payload(0)  # used again
    reader.payload(3)
    names = {path.stem for path in tmp_path.glob("*.tar")}
    assert names == {index.shards[n].sha256 for n in (0, 2, 3)}
    assert bytes_of(tmp_path) <= limit


def test_a_cache_that_is_far_too_small_still_gives_every_payload(store, tmp_path):
    index = fill(store)
    reader = ShardReader(store, index, tmp_path, cache_bytes=index.shards[0].bytes)
    for position in random.Random(1).choices(range(6), k=40):
        assert reader.payload(position) == content(position)
        assert bytes_of(tmp_path) <= index.shards[0].bytes
    tiny = ShardReader(store, index, tmp_path / "tiny", cache_bytes=1)
    assert tiny.payload(4) == content(4)


def test_an_evicted_copy_stays_readable_through_its_descriptor(store, tmp_path):
    reader = ShardReader(store, fill(store), tmp_path)
    with reader.shard_path(0).open("rb") as file:
        ShardCache(tmp_path, 1).evict()
        assert not list(tmp_path.glob("*.tar"))
        assert len(file.read()) == reader.index.shards[0].bytes
    assert reader.payload(0) == content(0)


def test_the_limit_of_the_folder_counts_for_who_names_none(tmp_path):
    assert ShardCache(tmp_path).max_bytes == DEFAULT_BYTES
    set_cache_limit(tmp_path, 1000)
    set_cache_limit(tmp_path, 1000)
    assert ShardCache(tmp_path).max_bytes == 1000
    assert ShardCache(tmp_path, 500).max_bytes == 500
    (tmp_path / ".limit.json").write_text("damaged")
    assert ShardCache(tmp_path).max_bytes == DEFAULT_BYTES
    with pytest.raises(ValueError, match="positive"):
        ShardCache(tmp_path, 0)


def test_one_download_serves_all_threads(store, tmp_path):
    index = fill(store, shards=1)
    readers = [ShardReader(store, index, tmp_path) for _ in range(8)]
    fetched = []

    class Counted(ShardCache):
        def _fetch(self, *args):
            fetched.append(threading.get_ident())
            time.sleep(0.1)
            return super()._fetch(*args)

    for reader in readers:
        reader._cache = Counted(tmp_path)
    threads = [threading.Thread(target=reader.payload, args=(0,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(fetched) == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"{index.shards[0].sha256}.tar"]


def test_a_fetch_that_is_damaged_once_is_repeated_and_twice_is_an_error(tmp_path):
    data = content(1)
    digest = hashlib.sha256(data).hexdigest()
    sent = [b"damaged", data]

    def check(path):
        return None if path.read_bytes() == data else "it is damaged"

    path = ShardCache(tmp_path).obtain(digest, len(data), lambda target: target.write_bytes(sent.pop(0)), check)
    assert path.read_bytes() == data
    path.unlink()
    with pytest.raises(DamagedCopyError, match="it is damaged"):
        ShardCache(tmp_path).obtain(digest, len(data), lambda target: target.write_bytes(b"x"), check)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_makes_the_other_copies_leave(tmp_path):
    (tmp_path / "old.tar").write_bytes(b"x" * 100)
    calls = []

    def fetch(target):
        calls.append(target)
        if (tmp_path / "old.tar").exists():
            raise ObjectStoreError(errno.ENOSPC, "no space")
        target.write_bytes(b"new")

    assert ShardCache(tmp_path).obtain("new", 3, fetch, lambda path: None).read_bytes() == b"new"
    assert len(calls) == 2


def full_disk(target):
    raise ObjectStoreError(errno.ENOSPC, "no space")


def test_a_disk_that_stays_full_is_an_error(tmp_path):
    with pytest.raises(ObjectStoreError, match="no space"):
        ShardCache(tmp_path).obtain("b", 3, full_disk, lambda path: None)
    assert list(tmp_path.iterdir()) == []


WORKER = """
import random, sys
from pathlib import Path
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader

store = ObjectStore("s3://speech/shared-cache")
reader = ShardReader(store, ShardIndex.read(store), Path(sys.argv[1]), int(sys.argv[2]))
print("ready", flush=True)
source = random.Random(int(sys.argv[3]))
for _ in range(int(sys.argv[4])):
    position = source.randrange(len(reader))
    assert reader.payload(position) == random.Random(position).randbytes(40_000)
"""


def start_worker(folder, limit, seed, reads):
    command = [sys.executable, "-c", WORKER, str(folder), str(limit), str(seed), str(reads)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_share_a_small_cache_and_one_is_killed(s3_server, tmp_path):
    index = fill(ObjectStore("s3://speech/shared-cache"), shards=8)
    limit = 3 * index.shards[0].bytes
    workers = [start_worker(tmp_path, limit, seed, 25) for seed in range(2)]
    victim = start_worker(tmp_path, limit, 9, 10**6)
    victim.stdout.readline()
    time.sleep(0.5)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors[-2000:]
    assert bytes_of(tmp_path) <= limit
    ShardCache(tmp_path).sweep(min_age_s=0.0)
    assert all(path.suffix == ".tar" for path in tmp_path.iterdir())


def test_sweep_removes_what_the_dead_left_and_nothing_of_the_living(tmp_path):
    (tmp_path / ".tmp-dead").write_bytes(b"half a shard")
    (tmp_path / ".lock-dead").touch()
    with passing_lock(tmp_path / ".lock-alive", 1.0):
        ShardCache(tmp_path).sweep()
        assert len(list(tmp_path.iterdir())) == 3  # all young
        ShardCache(tmp_path).sweep(min_age_s=0.0)
        assert [path.name for path in tmp_path.iterdir()] == [".lock-alive"]
    assert list(tmp_path.iterdir()) == []


def test_a_passing_lock_excludes_and_waits_no_longer_than_asked(tmp_path):
    path, inside, most = tmp_path / "lock", [], []

    def work():
        for _ in range(20):
            with passing_lock(path, 30.0, poll_s=0.001):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 120
    assert max(most) == 1
    with passing_lock(path, 0.0), pytest.raises(LockTimeoutError), passing_lock(path, 0.05, poll_s=0.01):
        pass


def test_is_locked(tmp_path):
    path = tmp_path / "x.lock"
    assert not is_locked(path)
    with file_lock(path, 0.0):
        assert is_locked(path)
    assert not is_locked(path)


class TestPrefetch:
    def wait_for(self, reader):
        thread = reader._prefetcher
        if thread is not None:
            thread.join(30)

    def test_shards_are_there_when_they_are_wanted(self, store, tmp_path):
        index = fill(store)
        reader = ShardReader(store, index, tmp_path)
        reader.prefetch([2, 4])
        self.wait_for(reader)
        assert {path.stem for path in tmp_path.glob("*.tar")} == {index.shards[n].sha256 for n in (2, 4)}
        store.delete("2.tar")
        assert reader.payload(2) == content(2)

    def test_no_more_than_half_the_cache_is_filled_ahead(self, store, tmp_path):
        index = fill(store)
        reader = ShardReader(store, index, tmp_path, cache_bytes=4 * index.shards[0].bytes)
        reader.prefetch(range(6))
        self.wait_for(reader)
        assert len(list(tmp_path.glob("*.tar"))) == 2

    def test_damage_is_left_to_the_reader(self, store, tmp_path):
        reader = ShardReader(store, fill(store), tmp_path)
        store.write("0.tar", b"damaged")
        reader.prefetch([0, 1])
        self.wait_for(reader)
        assert reader.payload(1) == content(1)
        with pytest.raises(ShardError):
            reader.payload(0)
        with pytest.raises(IndexError):
            reader.prefetch([99])

    def test_local_shards_are_verified_ahead(self, tmp_path):
        store = ObjectStore(tmp_path / "store")
        fill(store)
        reader = ShardReader(store, ShardIndex.read(store))
        reader.prefetch(range(6))
        self.wait_for(reader)
        assert len(reader._paths) == 6


def test_a_shard_error_names_the_record_and_may_pass_between_processes(store, tmp_path):
    import pickle

    index = fill(store)
    store.write("1.tar", b"damaged")
    with pytest.raises(ShardError) as caught:
        ShardReader(store, index, tmp_path).payload(1)
    assert caught.value.shard == index.shards[1]
    assert caught.value.reason == f"it has 7 bytes instead of {index.shards[1].bytes}"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.shard, copy.reason, str(copy)) == (caught.value.shard, caught.value.reason, str(caught.value))


def test_a_local_shard_that_vanishes_while_in_use(tmp_path):
    store = ObjectStore(tmp_path)
    reader = ShardReader(store, fill(store))
    assert reader.payload(2) == content(2)
    store.delete("2.tar")
    with pytest.raises(ShardError, match="missing"):
        reader.payload(2)
