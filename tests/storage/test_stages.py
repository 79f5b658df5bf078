"""Content addresses and the record that makes an output complete."""

import hashlib
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.intact import DamagedObjectError
from storage.objects import ObjectStore
from storage.stages import StageOutput, digest_json, stage_key

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_digest_never_changes():
    # The addresses of everything that users have stored depend on this value.
    assert digest_json({"b": [1, 2.5], "a": "ü"}) == "75151e181452ee19f62c437a12e96bbbe4453c199f041abfe6b18ab3cb8f3c4f"
    assert stage_key("shard", 1, {"rate": 16000}, {"corpus": "ab"}) == "1acbd1ccedd1570d"


@given(JSON)
def test_digest_ignores_order_of_keys(value):
    def turned(item):
        if isinstance(item, dict):
            return {key: turned(item[key]) for key in reversed(item)}
        return [turned(entry) for entry in item] if isinstance(item, list) else item

    assert digest_json(value) == digest_json(turned(value))


def test_tuples_and_lists_have_the_same_digest():
    assert digest_json({"a": (1, 2)}) == digest_json({"a": [1, 2]})


@pytest.mark.parametrize(
    ("value", "part"), [({1: "a"}, "key 1"), ({"a": {"b": {1, 2}}}, r"value\.a\.b"), ([b"x"], r"value\[0\]")]
)
def test_values_that_json_does_not_distinguish_are_refused(value, part):
    with pytest.raises(ValueError, match=part):
        digest_json(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_non_finite_numbers(value):
    with pytest.raises(ValueError):
        digest_json({"a": value})


def test_key_depends_on_each_of_its_parts():
    keys = {
        stage_key("shard", 1, {"a": 1}, {"x": "d"}),
        stage_key("features", 1, {"a": 1}, {"x": "d"}),
        stage_key("shard", 2, {"a": 1}, {"x": "d"}),
        stage_key("shard", 1, {"a": 2}, {"x": "d"}),
        stage_key("shard", 1, {"a": 1}, {"x": "e"}),
        stage_key("shard", 1, {"a": 1}, {"y": "d"}),
    }
    assert len(keys) == 6
    assert all(len(key) == 16 for key in keys)


@pytest.fixture
def output(tmp_path):
    return StageOutput(ObjectStore(tmp_path), "shard", "0123456789abcdef")


def test_output_has_no_record_until_published(output, tmp_path):
    output.store.write("a.tar", b"1")
    assert output.record() is None
    assert output.publish({"utterances": 3}) == output.record()
    assert output.record() == {"utterances": 3, "stage": "shard", "key": "0123456789abcdef"}
    assert (tmp_path / "shard" / "0123456789abcdef" / "done.json").is_file()


def test_clear_removes_the_record_first(output, monkeypatch):
    output.store.write("a.tar", b"1")
    output.publish({})
    order = []
    monkeypatch.setattr(output.store, "delete", order.append)
    monkeypatch.setattr(output.store, "delete_tree", order.append)
    output.clear()
    assert order == ["done.json", ""]
    monkeypatch.undo()
    output.clear()
    assert output.record() is None
    assert output.store.list() == []


@pytest.mark.parametrize("content", [b"[]", b"{}", b"{", b"null", b"\xff", b'{"stage": "shard", "key": "other"}'])
def test_malformed_record_is_refused_with_url_and_remedy(output, content):
    output.store.write("done.json", content)
    with pytest.raises(DamagedObjectError, match=r"done\.json is (damaged|not valid JSON) .*--repair --url file:///"):
        output.record()


def test_altered_record_is_refused(output):
    output.publish({"utterances": 35})
    data = output.store.read("done.json")
    output.store.write("done.json", data.replace(b"35", b"36"))
    with pytest.raises(DamagedObjectError, match="its checksum does not match"):
        output.record()
    output.store.write("done.json", data)
    assert output.record()["utterances"] == 35


@pytest.mark.parametrize("field", ["checksum", "objects"])
def test_record_without_checksum_or_list_is_refused(output, field):
    output.publish({"x": 1})
    record = output.store.read_json("done.json")
    output.store.write_json("done.json", {name: value for name, value in record.items() if name != field})
    for read in (output.record, output.promised, output.lacking):
        with pytest.raises(DamagedObjectError, match=r"done\.json is damaged \(its checksum .*--repair --url file:///"):
            read()


class TestRecordedObjects:
    """The record lists all objects, so that later losses and changes are detected."""

    @pytest.fixture
    def output(self, output):
        output.store.write("a.tar", b"shard")
        output.store.write("deep/b.json", b"{}")
        output.note_use({"prepare": "a" * 16}, "2026-01-01")
        output.publish({})
        return output

    def test_record_lists_all_objects_except_notes_and_itself(self, output):
        digest = hashlib.sha256(b"{}").hexdigest()
        assert output.promised() == {"a.tar": (5, ""), "deep/b.json": (2, digest)}
        assert output.lacking() == []

    def test_missing_and_truncated_objects_are_lacking(self, output):
        output.store.delete("a.tar")
        assert output.lacking() == ["a.tar"]
        output.store.write("deep/b.json", b"{} ")
        assert output.lacking() == ["a.tar", "deep/b.json"]

    def test_objects_are_compared_with_the_record_when_read(self, output, tmp_path):
        assert output.read("deep/b.json") == b"{}"
        assert output.fetch("deep/b.json", tmp_path).read_bytes() == b"{}"
        output.store.write("deep/b.json", b"[]")
        output.store.write("a.tar", b"other")
        output.store.write("new.json", b"not listed")
        for method in (output.read, lambda name: output.fetch(name, tmp_path)):
            with pytest.raises(DamagedObjectError, match=r"deep/b\.json is damaged \(its SHA-256"):
                method("deep/b.json")
            method("a.tar")
            method("new.json")
            with pytest.raises(DamagedObjectError, match=r"gone\.json is damaged \(it is missing\)"):
                method("gone.json")

    def test_forgotten_object_is_not_reported_as_missing(self, output):
        output.forget(["a.tar", "unknown"])
        assert output.promised().keys() == {"deep/b.json"}
        assert output.record() == {"stage": output.stage, "key": output.key}
        before = output.store.read("done.json")
        output.forget(["unknown"])
        assert output.store.read("done.json") == before

    def test_an_output_is_found_by_its_url(self, output):
        assert StageOutput.at(output.store.url).record() == output.record()


class NotesContract:
    """Many runs may note their use at once; a subclass provides the fixture `store`."""

    def test_concurrent_notes_of_use_are_all_kept(self, store):
        """As from several machines: each writer has a separate object store."""
        url, begin = store.url, threading.Barrier(6)

        def work(number):
            begin.wait(240)
            for turn in range(5):
                output = StageOutput(ObjectStore(url), "shard", "a" * 16)
                output.note_use({"prepare": f"{number}-{turn}"}, "2026-01-01")

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))  # raises what a writer raised
        expected = sorted(f"{number}-{turn}" for number in range(6) for turn in range(5))
        assert StageOutput(store, "shard", "a" * 16).uses() == {"prepare": expected}


class TestNotesLocal(NotesContract):
    @pytest.fixture
    def store(self, tmp_path):
        return ObjectStore(tmp_path)


class TestNotesInMemory(NotesContract):
    @pytest.fixture
    def store(self):
        return ObjectStore(f"memory://n{uuid.uuid4().hex}")


class TestNotesOnS3(NotesContract):
    @pytest.fixture
    def store(self, s3_server):
        return ObjectStore(f"s3://speech/{uuid.uuid4().hex}")


@pytest.mark.parametrize("stage", ["", "a/b", "../x", "-x"])
def test_refuses_bad_stage_names(tmp_path, stage):
    with pytest.raises(ValueError, match="stage"):
        StageOutput(ObjectStore(tmp_path), stage, "k")
