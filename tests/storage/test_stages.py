"""Content addresses and the record that makes an output complete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.objects import ObjectStore
from storage.stages import StageOutput, digest_json, stage_key

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_digest_is_frozen():
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


def test_tuples_are_lists():
    assert digest_json({"a": (1, 2)}) == digest_json({"a": [1, 2]})


@pytest.mark.parametrize(
    ("value", "part"), [({1: "a"}, "key 1"), ({"a": {"b": {1, 2}}}, r"value\.a\.b"), ([b"x"], r"value\[0\]")]
)
def test_refuses_what_json_would_blur(value, part):
    with pytest.raises(ValueError, match=part):
        digest_json(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_non_finite_numbers(value):
    with pytest.raises(ValueError):
        digest_json({"a": value})


def test_every_ingredient_changes_the_key():
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


def test_has_no_record_until_published(output, tmp_path):
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


def test_a_record_that_is_no_object_is_refused(output):
    output.store.write("done.json", b"[]")
    with pytest.raises(ValueError, match=r"done\.json is not a JSON object"):
        output.record()


@pytest.mark.parametrize("stage", ["", "a/b", "../x", "-x"])
def test_refuses_bad_stage_names(tmp_path, stage):
    with pytest.raises(ValueError, match="stage"):
        StageOutput(ObjectStore(tmp_path), stage, "k")
