"""The cache of remote shards: bounded, shared between processes, and cleaned up after kills."""

import errno
import fcntl
import hashlib
import os
import random
import shutil
import threading
import time

import pytest
from cached_shards import bytes_of, content, fill
from support import open_files

from storage import cache as cache_module
from storage.cache import DEFAULT_BYTES, CacheFullError, DamagedCopyError, ShardCache, set_cache_limit
from storage.index import ShardIndex
from storage.locks import LockTimeoutError, file_lock, is_locked, passing_lock
from storage.objects import ObjectStore, ObjectStoreError
from storage.reading import ShardError, ShardReader


@pytest.fixture
def store():
    return ObjectStore(f"memory://cache-{random.getrandbits(60):x}")


def age(path, seconds):
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))


def test_least_recently_used_copies_are_evicted_first(store, tmp_path):
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


def test_cache_far_too_small_still_returns_every_payload(store, tmp_path):
    index = fill(store)
    reader = ShardReader(store, index, tmp_path, cache_bytes=index.shards[0].bytes)
    for position in random.Random(1).choices(range(6), k=40):
        assert reader.payload(position) == content(position)
        assert bytes_of(tmp_path) <= index.shards[0].bytes
    tiny = ShardReader(store, index, tmp_path / "tiny", cache_bytes=1)
    assert tiny.payload(4) == content(4)


def test_evicted_copy_stays_readable_through_its_descriptor(store, tmp_path):
    reader = ShardReader(store, fill(store), tmp_path)
    with reader.shard_path(0).open("rb") as file:
        ShardCache(tmp_path, 1).evict()
        assert not list(tmp_path.glob("*.tar"))
        assert len(file.read()) == reader.index.shards[0].bytes
    assert reader.payload(0) == content(0)


def test_folders_limit_applies_if_none_is_given(tmp_path):
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
        thread.join(240)
    assert len(fetched) == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"{index.shards[0].sha256}.tar"]


def read_copy(folder, digest, fetch, check=lambda file: None):
    """The content of a copy through the descriptor that the cache gives."""
    with os.fdopen(ShardCache(folder).open(digest, 3, fetch, check), "rb") as file:
        return os.pread(file.fileno(), 10**6, 0)


def test_damaged_fetch_is_repeated_once_before_an_error(tmp_path):
    data = content(1)
    digest = hashlib.sha256(data).hexdigest()
    sent = [b"damaged", data]

    def check(file):
        return None if file.read() == data else "it is damaged"

    assert read_copy(tmp_path, digest, lambda target: target.write_bytes(sent.pop(0)), check) == data
    (tmp_path / f"{digest}.tar").unlink()
    with pytest.raises(DamagedCopyError, match="it is damaged"):
        read_copy(tmp_path, digest, lambda target: target.write_bytes(b"x"), check)
    assert list(tmp_path.iterdir()) == []


def test_descriptors_are_not_left_open(store, tmp_path):
    index = fill(store)
    reader = ShardReader(store, index, tmp_path, cache_bytes=1)
    store.write("5.tar", b"damaged")
    for position in [*range(5), *range(5)]:
        assert reader.payload(position) == content(position)
    with pytest.raises(ShardError):
        reader.payload(5)
    reader.recheck(0)
    reader.shard_path(1)
    reader.prefetch([2])
    TestPrefetch().wait_for(reader)
    assert open_files(tmp_path) == []


def test_full_disk_evicts_other_copies(tmp_path):
    (tmp_path / "old.tar").write_bytes(b"x" * 100)
    calls = []

    def fetch(target):
        calls.append(target)
        if (tmp_path / "old.tar").exists():
            raise ObjectStoreError(errno.ENOSPC, "no space")
        target.write_bytes(b"new")

    assert read_copy(tmp_path, "new", fetch) == b"new"
    assert len(calls) == 2


def full_disk(target):
    raise ObjectStoreError(errno.ENOSPC, "no space")


def test_lasting_full_disk_leaves_no_partial_copy(tmp_path):
    with pytest.raises(CacheFullError, match="no room for a copy of 3 bytes"):
        ShardCache(tmp_path).open("b", 3, full_disk, lambda file: None)
    assert list(tmp_path.iterdir()) == []


class FullDisk:
    """A store whose objects do not fit on the local disk; it counts what is read instead."""

    def __init__(self, monkeypatch):
        self.tried = []
        monkeypatch.setattr(ObjectStore, "fetch_into", self)

    def __call__(self, name, target):
        self.tried.append(name)
        full_disk(target)


def test_full_disk_is_read_through_and_reported_once(store, tmp_path, monkeypatch, caplog):
    index = fill(store)
    store.write("5.tar", b"x" * index.shards[5].bytes)
    disk = FullDisk(monkeypatch)
    reader = ShardReader(store, index, tmp_path)
    for position in (0, 1, 0, 4):
        assert reader.payload(position) == content(position)
    with pytest.raises(ShardError, match="SHA-256"):
        reader.payload(5)
    store.delete("3.tar")
    with pytest.raises(ShardError, match="missing"):
        reader.payload(3)
    reader.prefetch([2])
    TestPrefetch().wait_for(reader)
    assert len(disk.tried) == 1, "for a while nothing is copied in vain"
    (told,) = [record.getMessage() for record in caplog.records]
    assert "no room for a copy" in told
    assert str(tmp_path) in told
    reader._full_until = 0.1  # the minute is over, and there is space again
    monkeypatch.undo()
    store.delete("0.tar")
    assert reader.payload(2) == content(2)
    with pytest.raises(ShardError, match="missing"):
        reader.payload(0)


def test_unreadable_payload_read_through_is_verified_again(store, tmp_path, monkeypatch):
    index = fill(store)
    FullDisk(monkeypatch)
    reader = ShardReader(store, index, tmp_path)
    assert reader.payload(0) == content(0)
    reader.recheck(0)
    data = store.read("0.tar")
    store.write("0.tar", data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:])
    with pytest.raises(ShardError, match="SHA-256"):
        reader.recheck(0)
    store.write("0.tar", data[:5000])
    with pytest.raises(ShardError, match="SHA-256"):
        reader.payload(0)


def test_emptied_cache_folder_is_filled_again(store, tmp_path):
    folder = tmp_path / "cache"
    reader, emptied = ShardReader(store, fill(store), folder), []
    assert reader.payload(0) == content(0)
    shutil.rmtree(folder)
    assert reader.payload(0) == content(0)

    def fetch(target):
        target.write_bytes(b"new")
        if not emptied:
            emptied.append(shutil.rmtree(folder))

    assert read_copy(folder, "new", fetch) == b"new"


def test_eviction_between_finding_and_reading_is_tolerated(store, tmp_path, monkeypatch):
    """Another process evicts each copy as soon as it exists: its reader has already opened it."""
    index = fill(store)
    reader = ShardReader(store, index, tmp_path)
    publish = cache_module.publish_file

    def evicted_at_once(source, target):
        publish(source, target)
        target.unlink()

    monkeypatch.setattr(cache_module, "publish_file", evicted_at_once)
    for position in (0, 1, 0):
        assert reader.payload(position) == content(position)


def test_evictions_by_another_process_are_taken_into_account(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.tar").write_bytes(bytes(100))
    folder = os.open(tmp_path, os.O_RDONLY)
    removed = []
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: removed.extend(ShardCache(tmp_path, 200).evict()))
        thread.start()
        thread.join(0.3)
        (tmp_path / "a.tar").unlink(missing_ok=True)  # evicted by the process that holds the lock
    finally:
        os.close(folder)
    thread.join(240)
    assert removed == []
    assert len(list(tmp_path.glob("*.tar"))) == 2


def test_sweep_removes_files_of_dead_processes_only(tmp_path):
    (tmp_path / ".tmp-dead").write_bytes(b"half a shard")
    (tmp_path / ".lock-dead").touch()
    with passing_lock(tmp_path / ".lock-alive", 1.0):
        ShardCache(tmp_path).sweep()
        assert len(list(tmp_path.iterdir())) == 3  # all recent
        ShardCache(tmp_path).sweep(min_age_s=0.0)
        assert [path.name for path in tmp_path.iterdir()] == [".lock-alive"]
    assert list(tmp_path.iterdir()) == []


def test_short_lock_excludes_and_waits_no_longer_than_requested(tmp_path):
    path, inside, most = tmp_path / "lock", [], []

    def work():
        for _ in range(20):
            with passing_lock(path, 240.0, poll_s=0.001):
                inside.append(1)
                time.sleep(0.0005)  # long enough for another to come in, if it could
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(most) == 120
    assert max(most) == 1
    with passing_lock(path, 0.0), pytest.raises(LockTimeoutError), passing_lock(path, 0.05, poll_s=0.01):
        pass


def test_is_locked_sees_locks_of_others(tmp_path):
    path = tmp_path / "x.lock"
    assert not is_locked(path)
    with file_lock(path, 0.0):
        assert is_locked(path)
    assert not is_locked(path)


class TestPrefetch:
    def wait_for(self, reader):
        thread = reader._prefetcher
        if thread is not None:
            thread.join(240)

    def test_shards_are_fetched_before_they_are_needed(self, store, tmp_path):
        index = fill(store)
        reader = ShardReader(store, index, tmp_path)
        reader.prefetch([2, 4])
        self.wait_for(reader)
        assert {path.stem for path in tmp_path.glob("*.tar")} == {index.shards[n].sha256 for n in (2, 4)}
        store.delete("2.tar")
        assert reader.payload(2) == content(2)

    def test_prefetch_fills_at_most_half_the_cache(self, store, tmp_path):
        index = fill(store)
        reader = ShardReader(store, index, tmp_path, cache_bytes=4 * index.shards[0].bytes)
        reader.prefetch(range(6))
        self.wait_for(reader)
        assert len(list(tmp_path.glob("*.tar"))) == 2

    def test_prefetch_leaves_damage_to_the_reader(self, store, tmp_path):
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


def test_shard_error_names_the_record_and_can_be_pickled(store, tmp_path):
    import pickle

    index = fill(store)
    store.write("1.tar", b"damaged")
    with pytest.raises(ShardError) as caught:
        ShardReader(store, index, tmp_path).payload(1)
    assert caught.value.shard == index.shards[1]
    assert caught.value.reason == f"it has 7 bytes instead of {index.shards[1].bytes}"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.shard, copy.reason, str(copy)) == (caught.value.shard, caught.value.reason, str(caught.value))


def test_local_shard_that_vanishes_while_in_use_is_an_error(tmp_path):
    store = ObjectStore(tmp_path)
    reader = ShardReader(store, fill(store))
    assert reader.payload(2) == content(2)
    store.delete("2.tar")
    with pytest.raises(ShardError, match="missing"):
        reader.payload(2)
