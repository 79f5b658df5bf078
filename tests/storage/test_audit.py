"""Verify and measure whole stores, on a folder, in memory and on S3."""

import io
import random
import uuid
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save

from storage.audit import VANISHED, index_names, repair, usage, verify
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
    described = {}
    for number, name in enumerate(sets):
        index = fill(output.store.child(name), first=10 * number)
        described[name] = {"digest": index.digest, "bytes": sum(shard.bytes for shard in index.shards)}
    output.publish({"sets": described, **record})
    return output


def parquet():
    """A small table."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"x": list(range(100))}), buffer, compression="none", write_page_checksum=True)
    return buffer.getvalue()


class AuditContract:
    """Contract of every kind of store; a subclass provides the fixture `store`."""

    def test_intact_store_has_no_problems(self, store):
        publish(store, "shard", "a", ("train", "test"))
        done = []
        report = verify(store, on_progress=lambda *figures: done.append(figures))
        assert report.problems == []
        assert (report.indexes, report.shards) == (2, 6)
        assert report.bytes == sum(e.size for e in store.entries() if e.path.endswith(".tar"))
        assert done[-1] == (14, 14)  # shards, their part files, and the indexes as the record lists them
        assert report.objects == 7  # part files and the record

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (lambda data: data[:-512], "bytes instead of"),
            (lambda data: data[:800] + b"\xff" + data[801:], "SHA-256"),
            (lambda data: None, "missing"),
        ],
    )
    def test_every_damage_is_reported(self, store, damage, reason):
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

    def test_missing_or_foreign_index_is_reported(self, store):
        first_output, second_output = publish(store, "shard", "a"), publish(store, "shard", "b")
        first_output.store.delete("train/index.parquet")
        fill(second_output.store.child("train"), shards=2)
        first, second = verify(store).problems
        assert "missing, but the stage's record names it" in first.reason
        assert "digest differs" in second.reason

    def test_broken_index_or_record_is_reported(self, store):
        output = publish(store, "shard", "a")
        output.store.write("train/index.parquet", b"no parquet")
        for key, content in (("b", b"{"), ("c", b"{}"), ("d", b"\x80")):
            store.write(f"score/{key * 16}/done.json", content)
        *records, index = [problem.reason for problem in verify(store).problems]
        assert len(records) == 3
        assert all("not a valid record of a stage" in reason for reason in records)
        assert "Parquet magic bytes not found" in index

    @pytest.mark.parametrize("quick", [True, False])
    def test_every_object_of_a_record_is_compared(self, store, quick):
        output = StageOutput(store, "score", "a" * 16)
        for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
            output.store.write(name, b"12345")
        output.publish({})
        output.store.delete("a.txt")
        output.store.write("b.txt", b"1234")
        output.store.write("c.txt", b"12346")
        reasons = {problem.object[-5:]: problem.reason for problem in verify(store, quick=quick).problems}
        assert reasons.pop("a.txt") == "missing, but the stage's record lists it"
        assert reasons.pop("b.txt") == "4 bytes instead of 5"
        assert reasons == ({} if quick else {"c.txt": "its SHA-256 differs from the stage's record"})

    def test_unrecorded_objects_are_parsed_by_their_kind(self, store):
        output = StageOutput(store, "train", "a" * 16)
        whole = {"x.json": b"{}", "y.parquet": parquet(), "z.safetensors": save({"w": np.zeros(9)}), "text": b"\xff"}
        for name, content in whole.items():
            output.store.write(name, content)
        assert verify(store).problems == []
        output.store.write("x.json", b"{")
        output.store.write("y.parquet", parquet()[:40] + b"\0" * 9 + parquet()[49:])
        output.store.write("z.safetensors", whole["z.safetensors"][:-1])
        reasons = [problem.reason for problem in verify(store).problems]
        assert "not valid JSON" in reasons[0]
        assert "checksum" in reasons[1]
        assert "its header announces" in reasons[2]
        assert verify(store, quick=True).problems == []

    @pytest.mark.parametrize("gone", ["done.json", "train/index.parquet", "train/shard-000001.tar"])
    def test_output_deleted_during_the_audit_is_no_problem(self, store, monkeypatch, gone):
        """An output that is deleted between the listing and the reading, record first."""
        output = publish(store, "shard", "a", ("train", "test"))
        publish(store, "shard", "b")
        listed = store.entries()

        class Earlier(ObjectStore):
            def entries(self, prefix=""):
                return listed if self.url == store.url else super().entries(prefix)

        output.store.delete("done.json")
        output.store.delete(gone)
        report = verify(Earlier(store.url))
        assert report.problems == []
        assert len(usage(Earlier(store.url))) == 2
        assert plan_garbage(Earlier(store.url), now=4e9, min_age_s=1.0).garbage == []

    @pytest.mark.parametrize("gone", ["train/index.parquet", "train/shard-000001.tar"])
    def test_object_that_vanishes_from_a_kept_output_is_a_problem(self, store, gone):
        output = publish(store, "shard", "a")
        listed = store.entries()

        class Earlier(ObjectStore):
            def entries(self, prefix=""):
                return listed

        output.store.delete(gone)
        problems = verify(Earlier(store.url)).problems
        assert [problem.reason for problem in problems] == [VANISHED]

    def test_repair_deletes_only_damaged_objects_and_their_records(self, store):
        shards = publish(store, "shard", "a", ("train", "test"))
        features, whole = publish(store, "features", "b"), publish(store, "decode", "c")
        StageOutput(store, "train", "d" * 16).store.write("state.json", b"{")
        shards.store.write("train/shard-000001.tar", b"damaged")
        shards.store.delete("test/index.parquet")
        features.store.write("train/parts/shard-000002.tar.json", b"{")
        before = set(store.list())
        store.write("mine/index.parquet", b"what nobody made")
        done = repair(store, verify(store).problems)
        first, second = f"shard/{'a' * 16}/", f"features/{'b' * 16}/"
        assert before - set(store.list()) == {
            *(first + "train/shard-000001.tar", first + "train/parts/shard-000001.tar.json", first + "done.json"),
            *(second + "train/parts/shard-000002.tar.json", second + "done.json"),
            f"train/{'d' * 16}/state.json",
        }
        assert set(done.outputs) == {first[:-1], second[:-1], f"train/{'d' * 16}"}
        assert set(done.deleted) == before - set(store.list()) - {first + "done.json", second + "done.json"}
        assert [problem.object for problem in done.left] == ["mine/index.parquet"]
        assert whole.record() is not None

    def test_repair_keeps_outputs_of_running_stages(self, store):
        output = publish(store, "shard", "a")
        output.store.write("train/shard-000001.tar", b"damaged")

        @contextmanager
        def lock(stage, key):
            assert (stage, key) == ("shard", "a" * 16)
            raise TimeoutError
            yield

        before = store.list()
        done = repair(store, verify(store).problems, lock)
        assert store.list() == before
        assert ([problem.object for problem in done.left], done.deleted, done.outputs) == (
            [f"shard/{'a' * 16}/train/shard-000001.tar"],
            [],
            [],
        )

    def test_shards_in_several_indexes_are_read_once(self, store):
        output = publish(store, "shard", "a")
        folder = output.store.child("train")
        index = ShardIndex.read(folder)
        index.write(folder, "index-fold-1.parquet")
        report = verify(store)
        assert (report.indexes, report.shards, report.problems) == (2, 3, [])

    def test_union_index_refers_to_shards_beside_it(self, store):
        output = publish(store, "shard", "a", ("fold-1", "fold-2"))
        parts = {name: ShardIndex.read(output.store.child(name)) for name in ("fold-1", "fold-2")}
        union_index(parts, "train").write(output.store.child("without-fold-3"))
        report = verify(store)
        assert (report.indexes, report.shards, report.problems) == (3, 6, [])
        assert plan_garbage(store, now=4e9, min_age_s=1.0).garbage == []

    def test_usage_is_listed_by_output_and_ignores_other_objects(self, store):
        publish(store, "shard", "a", ("train", "test"))
        StageOutput(store, "train", "b" * 16).store.write("checkpoints/1.json", b"{}")
        store.write("notes.txt", b"mine")
        store.write("shard/readme/x", b"mine")
        large, small = usage(store)
        assert (large.name, large.published) == (f"shard/{'a' * 16}", True)
        assert (small.name, small.published, small.bytes, len(small.objects)) == (f"train/{'b' * 16}", False, 2, 1)
        assert large.bytes == sum(e.size for e in store.entries(large.name))
        assert large.modified >= min(e.modified for e in large.objects)

    def test_empty_store_has_no_problems(self, store):
        assert verify(store).problems == []
        assert usage(store) == []

    def test_entries_have_sizes_and_times(self, store):
        store.write("a/b", b"12345")
        store.write("a/c", b"1")
        entries = store.entries("a")
        assert [(e.path, e.size) for e in entries] == [("a/b", 5), ("a/c", 1)]
        assert all(e.modified > 1.6e9 for e in entries)


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


def test_names_of_indexes_are_recognized():
    names = ["index.parquet", "a/index.parquet", "a/index-fold-2.parquet", "a/manifest.parquet", "a/reindex.parquet"]
    assert index_names(names) == names[:3]


def test_conflicting_digests_of_two_indexes_are_both_checked(tmp_path):
    store = ObjectStore(tmp_path)
    index = fill(store)
    wrong = tuple(replace(shard, sha256="0" * 64) for shard in index.shards)
    ShardIndex(index.table, wrong, index.metadata).write(store, "index-old.parquet")
    assert len(verify(store).problems) == 3
