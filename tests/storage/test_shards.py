"""Shards: exact bytes, part files, and that WebDataset itself reads them."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.index import ShardIndexError
from storage.objects import ObjectStore, ObjectStoreError
from storage.shards import Sample, ShardWriteError, build_index, load_part, member_key, part_name, write_shard

IDS = ["1272-128104-0000", "a.b.c", "../../evil", "spaß/ü %2F", "日本", "UPPER_lower-9", "x" * 240]


def sample(utterance_id, payload=b"fLaC", **row):
    base = {
        "duration": 2.5,
        "num_frames": 40000,
        "sample_rate": 16000,
        "text": "hello ü",
        "speaker": "s1",
        "corpus": "c",
    }
    return Sample(utterance_id, {"flac": payload}, {**base, **row})


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return ObjectStore(tmp_path) if request.param == "local" else ObjectStore(f"memory://shards{tmp_path}")


def test_offsets_point_at_the_payload(store):
    samples = [sample(name, os.urandom(100 * number)) for number, name in enumerate(IDS)]
    part = write_shard(store, "s.tar", samples, "flac")
    content = store.read("s.tar")
    for row, written in zip(part.rows, samples, strict=True):
        assert row["id"] == written.id
        assert content[row["offset"] : row["offset"] + row["length"]] == written.members["flac"]
    assert part.record.sha256 == hashlib.sha256(content).hexdigest()
    assert part.record.bytes == len(content)
    assert part.record.count == len(IDS)
    assert part.record.seconds == pytest.approx(2.5 * len(IDS))


def test_samples_have_payload_and_json_members(store):
    write_shard(store, "s.tar", [Sample("a.b", {"txt": b"t", "flac": b"f"}, {**sample("x").row, "extra": [1]})], "flac")
    with tarfile.open(fileobj=io.BytesIO(store.read("s.tar"))) as tar:
        assert tar.getnames() == ["a%2Eb.json", "a%2Eb.flac", "a%2Eb.txt"]
        value = json.load(tar.extractfile("a%2Eb.json"))
        info = tar.getmembers()[0]
    assert value["id"] == "a.b"
    assert value["text"] == "hello ü"
    assert value["extra"] == [1]
    assert (info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode) == (0, 0, 0, "", "", 0o644)


def test_a_given_json_member_is_kept(store):
    write_shard(store, "s.tar", [Sample("a", {"json": b'{"own": 1}', "flac": b"f"}, sample("x").row)], "flac")
    with tarfile.open(fileobj=io.BytesIO(store.read("s.tar"))) as tar:
        assert json.load(tar.extractfile("a.json")) == {"own": 1}


def test_bytes_of_shards_never_change(store):
    """If these bytes change, all shards that users have stored have other digests."""
    part = write_shard(store, "s.tar", [sample("a.b", b"\x01\x02"), sample("c")], "flac")
    assert part.record.sha256 == "1eb59c3bc89b7f155715be28641d880a20c6f6a18192768cc06d542c0287bebe"


def test_part_file_is_loaded(store):
    part = write_shard(store, "deep/s.tar", [sample(name) for name in IDS], "flac")
    assert load_part(store, "deep/s.tar") == part
    assert load_part(store, "other.tar") is None


def test_part_without_its_complete_shard_is_ignored(store):
    write_shard(store, "s.tar", [sample("a")], "flac")
    content = store.read("s.tar")
    store.write("s.tar", content[:-512])
    assert load_part(store, "s.tar") is None
    store.delete("s.tar")
    assert load_part(store, "s.tar") is None
    store.write("s.tar", content)
    assert load_part(store, "s.tar") is not None
    for broken in (b"{", b"[]", b"{}", b'{"record": {"name": 1}}', b"null"):
        store.write(part_name("s.tar"), broken)
        assert load_part(store, "s.tar") is None


def test_failing_source_leaves_no_object(store):
    write_shard(store, "s.tar", [sample("a")], "flac")

    def source():
        yield sample("a")
        raise RuntimeError("decoder died")

    with pytest.raises(RuntimeError):
        write_shard(store, "s.tar", source(), "flac")
    assert load_part(store, "s.tar") is None
    with pytest.raises(RuntimeError):
        write_shard(store, "new.tar", source(), "flac")
    assert "new.tar" not in store.list()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sample(""), "empty"),
        (sample("a\nb"), "control"),
        (sample("y" * 241), "longer"),
        (sample("a", duration=None), "duration is None"),
        (sample("a", duration=float("nan")), "duration is nan"),
        (sample("a", num_frames="7"), "num_frames"),
        (sample("a", text=None), "text is None"),
        (sample("a", extra={1, 2}), "not JSON"),
        (Sample("a", {"wav": b""}, sample("a").row), "no member 'flac'"),
        (Sample("a", {"flac": b"", "pickle": b""}, sample("a").row), "'pickle'"),
    ],
)
def test_refuses_bad_samples(store, bad, message):
    with pytest.raises(ShardWriteError, match=message):
        write_shard(store, "s.tar", [sample("good"), bad], "flac")
    assert store.list() == []


def test_refuses_bad_names_and_repeated_ids(store):
    for name in ("s", "s.tgz", ".tar", "a/.tar"):
        with pytest.raises(ShardWriteError, match=r"\.tar"):
            write_shard(store, name, [], "flac")
    for payload in ("pickle", "json"):
        with pytest.raises(ShardWriteError, match="payload"):
            write_shard(store, "s.tar", [], payload)
    with pytest.raises(ShardWriteError, match="twice"):
        write_shard(store, "s.tar", [sample("a"), sample("a")], "flac")


def test_a_full_disk_names_the_shard_and_the_remedy(store, monkeypatch):
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(store, "create", lambda name: contextlib.nullcontext(full))
        with pytest.raises(ObjectStoreError, match=r"s\.tar: .*Free some space"):
            write_shard(store, "s.tar", [sample("a")], "flac")
    assert store.list() == []


@settings(max_examples=100)
@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_keys_are_safe_and_unique(first, second):
    try:
        keys = member_key(first), member_key(second)
    except ShardWriteError:
        return
    assert (keys[0] == keys[1]) == (first == second)
    assert all(character.isascii() and (character.isalnum() or character in "%_-") for character in keys[0])


def test_build_index_lists_every_sample(store):
    parts = [
        write_shard(store, "0.tar", [sample("a"), sample("b")], "flac"),
        write_shard(store, "1.tar", [], "flac"),
        write_shard(store, "2.tar", [sample("c", duration=1.0)], "flac"),
    ]
    index = build_index(parts, {"stage": "shard"})
    assert [shard.name for shard in index.shards] == ["0.tar", "2.tar"]
    assert index.column("id") == ["a", "b", "c"]
    assert index.column("shard").tolist() == [0, 0, 1]
    assert index.metadata == {"payload": "flac", "stage": "shard"}
    assert index.seconds == pytest.approx(6.0)


def test_build_index_refuses_ids_in_two_shards(store):
    parts = [write_shard(store, f"{number}.tar", [sample("a")], "flac") for number in range(2)]
    with pytest.raises(ShardIndexError, match="'a'"):
        build_index(parts, {})


def test_build_index_refuses_mixed_payloads(store):
    parts = [
        write_shard(store, "0.tar", [sample("a")], "flac"),
        write_shard(store, "1.tar", [Sample("b", {"npy": b""}, sample("b").row)], "npy"),
    ]
    with pytest.raises(ShardWriteError, match="flac, npy"):
        build_index(parts, {})


READ_WITH_WEBDATASET = """
import json, sys
import webdataset
found = []
for entry in webdataset.WebDataset(sys.argv[1:], shardshuffle=False):
    found.append([entry["__key__"], sorted(k for k in entry if not k.startswith("__")), entry["flac"].hex(),
                  json.loads(entry["json"])["id"]])
print(json.dumps(found))
"""


def test_webdataset_reads_our_shards(tmp_path):
    store = ObjectStore(tmp_path)
    samples = [sample(name, name.encode()) for name in IDS]
    write_shard(store, "0.tar", samples[:4], "flac")
    write_shard(store, "1.tar", samples[4:], "flac")
    # WebDataset reads WDS_SECURE when it is imported: use another process
    command = [sys.executable, "-c", READ_WITH_WEBDATASET, str(tmp_path / "0.tar"), str(tmp_path / "1.tar")]
    result = subprocess.run(command, env={**os.environ, "WDS_SECURE": "1"}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    expected = [[member_key(name), ["flac", "json"], name.encode().hex(), name] for name in IDS]
    assert json.loads(result.stdout) == expected
