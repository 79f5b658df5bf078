"""Garbage collection deletes unused outputs: never new, used or registered ones, or their dependencies."""

import time
import uuid
from contextlib import contextmanager

import pytest

from storage.audit import verify
from storage.garbage import collect, plan_garbage
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard
from storage.stages import StageOutput

ROW = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000}
LATER = time.time() + 10 * 86400
DAY = 86400.0


def publish(store, stage, key, **uses):
    output = StageOutput(store, stage, key * 16)
    output.note_use({name: value * 16 for name, value in uses.items()}, "2026-01-01")
    output.store.write("data", stage.encode())
    output.publish({"counts": {}})
    return output


def fill(store):
    """Three shards and their index."""
    parts = [write_shard(store, f"{n}.tar", [Sample(f"u{n}", {"flac": bytes(500)}, ROW)], "flac") for n in range(3)]
    build_index(parts, {}).write(store)


def chain(store, key, registered=True):
    """Outputs of a whole run, each depending on the previous one."""
    stages = ["prepare", "shard", "train", "score", "register"][: 5 if registered else 4]
    for number, stage in enumerate(stages):
        publish(store, stage, key, **dict.fromkeys(stages[:number], key))


def names(plan):
    return {entry.name for entry in plan.garbage}


def plan_later(store, **options):
    return plan_garbage(store, **{"now": LATER, "min_age_s": DAY, **options})


class GarbageContract:
    """Contract of every kind of store; a subclass provides the fixture `store`."""

    def test_old_unfinished_output_is_garbage(self, store):
        chain(store, "a")
        StageOutput(store, "train", "b" * 16).store.write("checkpoints/1", b"12345")
        assert plan_garbage(store, now=time.time(), min_age_s=DAY).garbage == []
        plan = plan_later(store)
        assert names(plan) == {f"train/{'b' * 16}"}
        assert plan.bytes == 5
        assert plan_later(store, in_use=lambda stage, key: (stage, key) == ("train", "b" * 16)).garbage == []

    def test_dependencies_of_a_registered_model_are_kept(self, store):
        chain(store, "a")
        chain(store, "b")
        chain(store, "c", registered=False)
        assert plan_later(store).garbage == []
        plan = plan_later(store, registered={f"register/{'a' * 16}"})
        assert {name.split("/")[1][0] for name in names(plan)} == {"b", "c"}
        assert len(plan.garbage) == 9
        assert plan.kept[f"prepare/{'a' * 16}"].endswith("depends on it")

    def test_dependencies_of_a_running_stage_are_kept(self, store):
        chain(store, "a", registered=False)
        running = StageOutput(store, "train", "b" * 16)
        running.note_use({"prepare": "a" * 16, "shard": "a" * 16}, "2026-01-01")
        busy = {"in_use": lambda stage, key: (stage, key) == ("train", "b" * 16)}
        plan = plan_later(store, registered=(), **busy)
        assert names(plan) == {f"train/{'a' * 16}", f"score/{'a' * 16}"}

    def test_output_without_recorded_dependencies_keeps_everything(self, store):
        chain(store, "a")
        chain(store, "b")
        store.delete_tree(f"register/{'a' * 16}/uses")
        plan = plan_later(store, registered={f"register/{'a' * 16}"})
        assert plan.garbage == []
        assert "not all dependencies are known" in plan.kept[f"prepare/{'b' * 16}"]

    def test_shards_in_no_index_are_garbage(self, store):
        output = publish(store, "shard", "a")
        fill(output.store.child("train"))
        write_shard(output.store.child("train"), "extra.tar", [Sample("x", {"flac": b"1"}, ROW)], "flac")
        plan = plan_later(store)
        (entry,) = plan.garbage
        folder = f"shard/{'a' * 16}/train"
        assert entry.objects == (f"{folder}/extra.tar", f"{folder}/parts/extra.tar.json")
        assert collect(store, plan.garbage) == plan.garbage
        assert plan_later(store).garbage == []
        assert store.exists(f"{folder}/1.tar")

    def test_finished_output_is_complete_without_its_garbage(self, store):
        output = StageOutput(store, "shard", "a" * 16)
        fill(output.store.child("train"))
        write_shard(output.store.child("train"), "extra.tar", [Sample("x", {"flac": b"1"}, ROW)], "flac")
        output.publish({})
        plan = plan_later(store)
        assert collect(store, plan.garbage) == plan.garbage
        assert output.lacking() == []
        assert verify(store).problems == []

    @pytest.mark.parametrize("whole", [True, False])
    def test_output_with_damaged_record_is_left_to_verify(self, store, whole):
        output = publish(store, "shard", "a")
        fill(output.store.child("train"))
        write_shard(output.store.child("train"), "extra.tar", [Sample("x", {"flac": b"1"}, ROW)], "flac")
        output.publish({})
        output.store.write("done.json", b"{}")
        plan = plan_later(store, registered=() if whole else None)
        assert len(plan.garbage) == 1
        assert len(collect(store, plan.garbage)) == whole

    def test_indirect_dependencies_are_kept(self, store):
        """Each output notes the one before it only."""
        before = {}
        for stage in ("prepare", "shard", "train", "score", "register"):
            publish(store, stage, "a", **before)
            before = {stage: "a"}
        assert plan_later(store, registered={f"register/{'a' * 16}"}).garbage == []

    @pytest.mark.parametrize("withdrawn", [True, False])
    def test_missing_index_makes_no_shard_garbage(self, store, withdrawn):
        """The same holds for a record that a repair deletes, of a registered model's dependency."""
        chain(store, "a")
        output = StageOutput(store, "shard", "a" * 16)
        for name in ("train", "test"):
            fill(output.store.child(name))
        output.publish({})
        output.store.delete("train/index.parquet")
        if withdrawn:
            output.withdraw()
        for registered in ({f"register/{'a' * 16}"}, None)[: 1 if withdrawn else 2]:
            assert plan_later(store, registered=registered).garbage == []

    def test_unfinished_dependency_loses_no_shard(self, store):
        chain(store, "a")
        output = StageOutput(store, "shard", "a" * 16)
        fill(output.store.child("train"))
        write_shard(output.store.child("train"), "extra.tar", [Sample("x", {"flac": b"1"}, ROW)], "flac")
        output.withdraw()
        assert plan_later(store, registered={f"register/{'a' * 16}"}).garbage == []

    def test_damaged_index_makes_no_shard_garbage(self, store):
        output = publish(store, "shard", "a")
        fill(output.store.child("train"))
        output.store.write("train/index.parquet", b"damaged")
        assert plan_later(store).garbage == []

    def test_collection_deletes_only_the_planned_objects(self, store):
        chain(store, "a")
        chain(store, "b")
        store.write("notes.txt", b"mine")
        before = set(store.list())
        plan = plan_later(store, registered={f"register/{'a' * 16}"})
        assert set(store.list()) == before
        assert collect(store, plan.garbage) == plan.garbage
        assert set(store.list()) == {name for name in before if "b" * 16 not in name}

    def test_outputs_used_since_the_plan_are_kept(self, store):
        chain(store, "b")
        plan = plan_later(store, registered=())
        assert len(plan.garbage) == 5
        time.sleep(1.1)  # S3 counts whole seconds
        StageOutput(store, "train", "b" * 16).note_use({}, "2026-01-02")

        @contextmanager
        def lock(stage, key):
            if stage == "score":
                raise TimeoutError("a stage is at it")
            yield

        deleted = {entry.name for entry in collect(store, plan.garbage, lock)}
        assert deleted == {f"{stage}/{'b' * 16}" for stage in ("prepare", "shard", "register")}

    def test_unindexed_shards_of_a_running_stage_are_kept(self, store):
        """A stage that is forced or resumed writes beside the index of its former attempt."""
        output = publish(store, "shard", "a")
        fill(output.store.child("train"))
        write_shard(output.store.child("train"), "new.tar", [Sample("x", {"flac": b"1"}, ROW)], "flac")
        busy = {"in_use": lambda stage, key: True}
        assert plan_later(store, **busy).garbage == []
        assert plan_garbage(store, now=time.time(), min_age_s=DAY).garbage == []
        assert len(plan_later(store).garbage) == 1

    def test_output_whose_deletion_was_interrupted_looks_incomplete(self, store, monkeypatch):
        chain(store, "a")
        plan = plan_later(store, registered=())

        def killed(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(ObjectStore, "delete_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            collect(store, plan.garbage)
        first = plan.garbage[0].name.split("/")
        assert StageOutput(store, *first).record() is None


class TestLocal(GarbageContract):
    @pytest.fixture
    def store(self, tmp_path):
        return ObjectStore(tmp_path)


class TestMemory(GarbageContract):
    @pytest.fixture
    def store(self):
        return ObjectStore(f"memory://g{uuid.uuid4().hex}")


class TestS3(GarbageContract):
    @pytest.fixture
    def store(self, s3_server):
        return ObjectStore(f"s3://speech/{uuid.uuid4().hex}")


def test_notes_of_use_are_merged_and_written_once_a_day(tmp_path):
    output = StageOutput(ObjectStore(tmp_path), "shard", "a" * 16)
    assert output.uses() is None
    output.note_use({"prepare": "1"}, "2026-01-01")
    (path,) = (tmp_path / "shard" / ("a" * 16) / "uses").iterdir()
    before = path.stat().st_ino
    output.note_use({"prepare": "1"}, "2026-01-01")
    assert path.stat().st_ino == before
    output.note_use({"prepare": "1"}, "2026-01-02")
    assert path.stat().st_ino != before
    output.note_use({"prepare": "0", "x": "2"}, "2026-01-02")
    assert output.uses() == {"prepare": ["0", "1"], "x": ["2"]}
    path.write_text("[]")
    assert output.uses() is None
