"""Verify and measure whole stores, on a folder, in memory and on S3."""

import random
import uuid
from dataclasses import replace

import pytest

from storage.audit import index_names, usage, verify
from storage.garbage import plan_garbage
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard
from storage.stages import StageOutput
from storage.union import union_index

ROW = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000}


def fill(store, shards=3, first=0):
    """Shards and index of a set."""
    parts = []
    for n in range(first, first + shards):
        samples = [Sample(f"u{n}-{k}", {"flac": random.Random(n * 10 + k).randbytes(3000)}, ROW) for k in range(3)]
        parts.append(write_shard(store, f"shard-{n:06d}.tar", samples, "flac"))
    index = build_index(parts, {})
    index.write(store)
    return index


def publish(store, stage, key, sets=("train",), uses=None, **record):
    """A finished output with a set of shards each."""
    output = StageOutput(store, stage, key * 16)
    if uses is not None:
        output.note_use({name: value * 16 for name, value in uses.items()}, "2026-01-01")
    found = {}
    for number, name in enumerate(sets):
        index = fill(output.store.child(name), first=10 * number)
        found[name] = {"digest": index.digest, "bytes": sum(shard.bytes for shard in index.shards)}
    output.publish({"sets": found, **record})
    return output


class AuditContract:
    """What holds for every kind of store; a subclass gives the fixture `store`."""

    def test_a_whole_store_has_no_problems(self, store):
        publish(store, "shard", "a", ("train", "test"))
        done = []
        report = verify(store, on_progress=lambda *figures: done.append(figures))
        assert report.problems == []
        assert (report.indexes, report.shards) == (2, 6)
        assert report.bytes == sum(e.size for e in store.entries() if e.path.endswith(".tar"))
        assert done[-1] == (6, 6)

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (lambda data: data[:-512], "bytes instead of"),
            (lambda data: data[:800] + b"\xff" + data[801:], "SHA-256"),
            (lambda data: None, "missing"),
        ],
    )
    def test_every_damage_is_named(self, store, damage, reason):
        output = publish(store, "shard", "a")
        data = damage(output.store.read("train/shard-000001.tar"))
        if data is None:
            output.store.delete("train/shard-000001.tar")
        else:
            output.store.write("train/shard-000001.tar", data)
        (problem,) = verify(store).problems
        assert problem.object == f"shard/{'a' * 16}/train/shard-000001.tar"
        assert reason in problem.reason
        quick = verify(store, quick=True).problems
        assert quick == ([] if reason == "SHA-256" else [problem])

    def test_a_missing_or_foreign_index_is_named(self, store):
        one, two = publish(store, "shard", "a"), publish(store, "shard", "b")
        one.store.delete("train/index.parquet")
        fill(two.store.child("train"), shards=2)
        first, second = verify(store).problems
        assert "missing, but the stage's record names it" in first.reason
        assert "digest is not that" in second.reason

    def test_a_broken_index_or_record_is_named(self, store):
        output = publish(store, "shard", "a")
        output.store.write("train/index.parquet", b"no parquet")
        store.write(f"score/{'b' * 16}/done.json", b"{")
        reasons = [problem.reason for problem in verify(store).problems]
        assert len(reasons) == 2
        assert "no record of a stage" in reasons[0]
        assert "no shard index" in reasons[1]

    def test_shards_that_several_indexes_name_are_read_once(self, store):
        output = publish(store, "shard", "a")
        folder = output.store.child("train")
        index = ShardIndex.read(folder)
        index.write(folder, "index-fold-1.parquet")
        report = verify(store)
        assert (report.indexes, report.shards, report.problems) == (2, 3, [])

    def test_a_union_names_the_shards_beside_it(self, store):
        output = publish(store, "shard", "a", ("fold-1", "fold-2"))
        parts = {name: ShardIndex.read(output.store.child(name)) for name in ("fold-1", "fold-2")}
        union_index(parts, "train").write(output.store.child("without-fold-3"))
        report = verify(store)
        assert (report.indexes, report.shards, report.problems) == (3, 6, [])
        assert plan_garbage(store, now=4e9, min_age_s=1.0).garbage == []

    def test_usage_is_by_output_and_leaves_out_what_is_none(self, store):
        publish(store, "shard", "a", ("train", "test"))
        StageOutput(store, "train", "b" * 16).store.write("checkpoints/1.json", b"{}")
        store.write("notes.txt", b"mine")
        store.write("shard/readme/x", b"mine")
        large, small = usage(store)
        assert (large.name, large.published) == (f"shard/{'a' * 16}", True)
        assert (small.name, small.published, small.bytes, len(small.objects)) == (f"train/{'b' * 16}", False, 2, 1)
        assert large.bytes == sum(e.size for e in store.entries(large.name))
        assert large.modified >= min(e.modified for e in large.objects)

    def test_an_empty_store(self, store):
        assert verify(store).problems == []
        assert usage(store) == []

    def test_entries_have_sizes_and_times(self, store):
        store.write("a/b", b"12345")
        store.write("a/c", b"1")
        found = store.entries("a")
        assert [(e.path, e.size) for e in found] == [("a/b", 5), ("a/c", 1)]
        assert all(e.modified > 1.6e9 for e in found)


class TestLocal(AuditContract):
    @pytest.fixture
    def store(self, tmp_path):
        return ObjectStore(tmp_path)


class TestMemory(AuditContract):
    @pytest.fixture
    def store(self):
        return ObjectStore(f"memory://a{uuid.uuid4().hex}")


class TestS3(AuditContract):
    @pytest.fixture
    def store(self, s3_server):
        return ObjectStore(f"s3://speech/{uuid.uuid4().hex}")


def test_index_names():
    names = ["index.parquet", "a/index.parquet", "a/index-fold-2.parquet", "a/manifest.parquet", "a/reindex.parquet"]
    assert index_names(names) == names[:3]


def test_a_digest_that_two_indexes_give_differently_is_checked_for_both(tmp_path):
    store = ObjectStore(tmp_path)
    index = fill(store)
    wrong = tuple(replace(shard, sha256="0" * 64) for shard in index.shards)
    ShardIndex(index.table, wrong, index.metadata).write(store, "index-old.parquet")
    assert len(verify(store).problems) == 3
