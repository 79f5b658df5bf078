"""Names from outside never become paths elsewhere: ids, shards, indexes, bundles, runs, configurations."""

import pyarrow.parquet as pq
import pytest
from support import small_corpus, tiny_document, write_table, write_tone

from storage.index import SCHEMA, ShardIndex, ShardIndexError, ShardRecord
from storage.objects import ObjectNameError, ObjectStore
from storage.reading import ShardError, ShardReader
from storage.shards import ShardWriteError, member_key
from storage.stages import StageOutput
from tasks.config.pipeline import ConfigError, parse_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run

WAYS_OUT = [
    "../../evil",
    "/etc/passwd",
    "a/../../b",
    "..",
    ".",
    "a\\..\\b",
    "a\0b",
    "a\nb",
    "~root/x",
    "C:\\x",
    "%2e%2e/x",
]


@pytest.mark.parametrize("name", WAYS_OUT)
def test_hostile_ids_become_plain_member_names(name):
    if any(ord(character) < 32 for character in name):
        with pytest.raises(ShardWriteError, match="control characters"):
            member_key(name)
        return
    key = member_key(name)
    assert "/" not in key
    assert "\\" not in key
    assert key not in ("", ".", "..")
    assert all(ord(character) >= 32 for character in key)
    assert not key.startswith(("/", "."))


def test_ids_that_are_paths_write_nothing_outside_the_home_folder(home, tmp_path):
    outside = tmp_path / "outside" / "evil"  # no folder outside is created, nor anything in it
    ways_out = ["../../evil", str(outside), "a/../../b"]
    rows = []
    for number in range(8):
        write_tone(tmp_path / "corpus" / f"{number}.wav", seed=number)
        identity = ways_out[number] if number < 3 else f"u{number}"
        rows.append((identity, f"{number}.wav", "some words", f"s{number % 4}"))
    write_table(tmp_path / "corpus", rows)
    document = tiny_document(data={"sources": [{"kind": "table", "path": str(tmp_path / "corpus")}]})
    document["data"] |= {"sample_rate": 8000, "valid_share": 0.3}
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(home)}
    run = Run(parse_config(document), "names")
    run_plainly(run, "shard")
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(home)} == before
    assert not outside.exists()
    ids = set()
    for path in home.rglob("index.parquet"):
        ids |= set(pq.read_table(path)["id"].to_pylist())
    assert {*ways_out} <= ids


def small_index(name):
    record = ShardRecord(name, 1, 1.0, 2048, "0" * 64)
    row = dict.fromkeys(SCHEMA.names, 0) | {"duration": 1.0}
    row |= dict.fromkeys(("id", "text", "speaker", "corpus", "domain", "language"), "x")
    import pyarrow as pa

    return ShardIndex(pa.Table.from_pylist([row], schema=SCHEMA), (record,), {"payload": "flac"})


@pytest.mark.parametrize("name", ["../../secret.tar", "/etc/passwd", "a/../../../b.tar", "\\\\host\\share", "a\0b"])
def test_an_index_cannot_name_a_shard_outside_its_store(tmp_path, name):
    (tmp_path / "secret.tar").write_bytes(b"\0" * 2048)
    store = ObjectStore(str(tmp_path / "a" / "b"))
    small_index(name).write(store)
    with pytest.raises((ObjectNameError, ShardError, ShardIndexError)):
        ShardReader(store, ShardIndex.read(store)).payload(0)


@pytest.mark.parametrize("name", [*WAYS_OUT[:6], "", "a b/../c"])
def test_paths_are_refused_as_stages_keys_and_object_names(tmp_path, name):
    store = ObjectStore(str(tmp_path))
    with pytest.raises(ValueError):
        StageOutput(store, name, "key")
    with pytest.raises(ValueError):
        StageOutput(store, "stage", name)
    if name not in ("~root/x",):
        with pytest.raises(ObjectNameError):
            store.write(name, b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "", "..", "a\nb"])
def test_path_as_name_of_a_configuration_is_refused(name):
    with pytest.raises(ConfigError, match="name"):
        parse_config(tiny_document(name=name))


def test_files_of_a_corpus_are_never_changed(home, tmp_path):
    """A manifest may point at any audio that its reader may read: that is its purpose. Nothing is written there."""
    folder = small_corpus(tmp_path / "corpus")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    document = tiny_document(data={"sources": [{"kind": "table", "path": str(folder)}], "sample_rate": 8000})
    document["data"]["valid_share"] = 0.3
    run_plainly(Run(parse_config(document), "read-only"), "prepare")
    assert {path: path.read_bytes() for path in before} == before
