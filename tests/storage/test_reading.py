"""Random access to shards: verified once, copied when remote, safe between threads and processes."""

import os
import pickle
import tarfile
import threading
import uuid

import pytest
from support import open_files

from storage.objects import ObjectStore, RetryPolicy
from storage.reading import ShardError, ShardReader
from storage.safety import UnsafeTarError, check_tar
from storage.shards import Sample, build_index, write_shard

ROW = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000}
PAYLOADS = [bytes([number]) * (500 + 37 * number) for number in range(12)]


def fill(store):
    parts = []
    for shard in range(3):
        numbers = range(4 * shard, 4 * shard + 4)
        samples = [Sample(f"u.{number}", {"flac": PAYLOADS[number]}, ROW) for number in numbers]
        parts.append(write_shard(store, f"{shard}.tar", samples, "flac"))
    return build_index(parts, {})


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return ObjectStore(tmp_path / "store") if request.param == "local" else ObjectStore(f"memory://r{uuid.uuid4().hex}")


def test_payloads_are_read_in_any_order(store, tmp_path):
    reader = ShardReader(store, fill(store), tmp_path / "cache")
    assert len(reader) == 12
    for position in (11, 0, 5, 4, 5, 3):
        assert reader.payload(position) == PAYLOADS[position]
    for position in (-1, 12):
        with pytest.raises(IndexError):
            reader.payload(position)
    with pytest.raises(IndexError):
        reader.shard_path(3)


def test_empty_payload_is_read(store, tmp_path):
    index = build_index([write_shard(store, "e.tar", [Sample("a", {"flac": b""}, ROW)], "flac")], {})
    assert ShardReader(store, index, tmp_path / "cache").payload(0) == b""


def test_members_of_a_shard_are_listed(store, tmp_path):
    reader = ShardReader(store, fill(store), tmp_path / "cache")
    check_tar(reader.shard_path(1))
    with tarfile.open(reader.shard_path(1), "r:") as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    assert [name for name, _ in members[:3]] == ["u%2E4.json", "u%2E4.flac", "u%2E5.json"]
    assert [data for name, data in members if name.endswith(".flac")] == PAYLOADS[4:8]


def test_tar_without_members_is_refused(tmp_path):
    (tmp_path / "x.tar").write_bytes(b"\0" * 600)
    with pytest.raises(UnsafeTarError):
        check_tar(tmp_path / "x.tar")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-512], "bytes instead of"),
        (lambda content: content[:700] + b"\xff" + content[701:], "SHA-256"),
        (lambda content: None, "missing"),
    ],
)
def test_damage_is_detected_and_named(store, tmp_path, damage, message):
    index = fill(store)
    damaged = damage(store.read("1.tar"))
    if damaged is None:
        store.delete("1.tar")
    else:
        store.write("1.tar", damaged)
    reader = ShardReader(store, index, tmp_path / "cache")
    assert reader.payload(0) == PAYLOADS[0]
    with pytest.raises(ShardError, match=rf"1\.tar: .*{message}.*rerun the program"):
        reader.payload(5)
    assert sorted((tmp_path / "cache").glob("*")) in ([], [tmp_path / "cache" / f"{index.shards[0].sha256}.tar"])


def test_shard_with_correct_digest_is_still_checked(tmp_path):
    import hashlib

    from storage.index import ShardIndex, ShardRecord

    store = ObjectStore(tmp_path)
    index = fill(store)
    content = store.read("0.tar").replace(b"u%2E0.flac", b"u%2E0.pyd\0")
    evil = bytearray(content)
    header = content.index(b"u%2E0.pyd")
    evil[header + 148 : header + 156] = b" " * 8
    evil[header + 148 : header + 156] = b"%06o\0 " % sum(evil[header : header + 512])
    store.write("0.tar", bytes(evil))
    first = index.shards[0]
    record = ShardRecord(first.name, first.count, first.seconds, len(evil), hashlib.sha256(evil).hexdigest())
    reader = ShardReader(store, ShardIndex(index.table, (record, *index.shards[1:]), index.metadata))
    with pytest.raises(ShardError, match="pyd"):
        reader.payload(0)


class TestRemote:
    @pytest.fixture
    def store(self):
        return ObjectStore(f"memory://r{uuid.uuid4().hex}", retry=RetryPolicy(attempts=2, base_s=0))

    def test_only_needed_shards_are_copied_and_only_once(self, store, tmp_path):
        index = fill(store)
        assert ShardReader(store, index, tmp_path).payload(0) == PAYLOADS[0]
        assert [path.name for path in tmp_path.iterdir()] == [f"{index.shards[0].sha256}.tar"]
        store.delete("0.tar")  # the copy serves the next reader
        assert ShardReader(store, index, tmp_path).payload(1) == PAYLOADS[1]

    def test_damaged_copy_is_replaced(self, store, tmp_path):
        index = fill(store)
        copy = ShardReader(store, index, tmp_path).shard_path(0)
        copy.write_bytes(b"damaged")
        assert ShardReader(store, index, tmp_path).payload(0) == PAYLOADS[0]

    def test_copy_truncated_while_in_use_is_fetched_again(self, store, tmp_path):
        index = fill(store)
        reader = ShardReader(store, index, tmp_path)
        copy = reader.shard_path(0)
        os.truncate(copy, 1000)
        assert reader.payload(3) == PAYLOADS[3]
        assert copy.stat().st_size == index.shards[0].bytes

    def test_copy_damaged_while_in_use_is_fetched_again_on_request(self, store, tmp_path):
        index = fill(store)
        reader = ShardReader(store, index, tmp_path)
        copy = reader.shard_path(0)
        data = copy.read_bytes()
        copy.write_bytes(data.replace(PAYLOADS[3], bytes(len(PAYLOADS[3]))))
        assert reader.payload(3) != PAYLOADS[3]
        reader.recheck(3)
        assert reader.payload(3) == PAYLOADS[3]

    def test_temporary_cache_is_deleted_with_its_reader(self, store):
        reader = ShardReader(store, fill(store))
        folder = reader.shard_path(0).parent
        assert folder.is_dir()
        del reader
        assert not folder.exists()


def test_each_shard_is_verified_once(store, tmp_path, monkeypatch):
    from storage import reading

    index = fill(store)
    checked = []
    real = reading._problem
    monkeypatch.setattr(reading, "_problem", lambda path, record: checked.append(record.name) or real(path, record))
    reader = ShardReader(store, index, tmp_path / "cache")
    results = {}

    def work(worker):
        for position in range(12):
            results[worker, position] = reader.payload((position * 5 + worker) % 12)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(checked) == ["0.tar", "1.tar", "2.tar"]
    assert len(results) == 72
    assert all(data == PAYLOADS[(position * 5 + worker) % 12] for (worker, position), data in results.items())


def test_no_file_stays_open(tmp_path):
    store = ObjectStore(tmp_path)
    reader = ShardReader(store, fill(store))
    for position in range(12):
        reader.payload(position)
    assert open_files(tmp_path) == []


def test_reader_can_be_pickled(store, tmp_path):
    reader = ShardReader(store, fill(store), tmp_path / "cache")
    reader.payload(0)
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.payload(7) == PAYLOADS[7]
