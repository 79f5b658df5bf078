"""The Parquet index: round trip, digest, and everything that `validate` must detect."""

import dataclasses
import hashlib
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest

from storage.columns import ParquetColumns
from storage.index import SCHEMA, ShardIndex, ShardIndexError, ShardRecord
from storage.objects import ObjectMissingError, ObjectStore

ROWS = [
    {
        "id": f"u{number}",
        "shard": number // 2,
        "offset": 1024 * (number % 2) + 512,
        "length": 100,
        "duration": 1.5 + number,
        "num_frames": 24000,
        "sample_rate": 16000,
        "text": f"text {number} ü",
        "speaker": "s",
        "corpus": "c",
        "domain": "",
        "language": "en",
    }
    for number in range(4)
]
SHARDS = (ShardRecord("a.tar", 2, 4.0, 10240, "aa" * 32), ShardRecord("b.tar", 2, 8.0, 10240, "bb" * 32))


def make(rows=ROWS, shards=SHARDS, metadata=None):
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    return ShardIndex(table, tuple(shards), {"payload": "flac"} if metadata is None else metadata)


@pytest.fixture
def store(tmp_path):
    return ObjectStore(tmp_path)


def test_written_index_is_read_back(store):
    index = make(metadata={"payload": "flac", "stage": "shard"})
    index.write(store)
    copy = ShardIndex.read(store)
    assert [copy.row(position) for position in range(len(copy))] == ROWS
    assert copy.shards == index.shards
    assert copy.metadata == index.metadata
    assert copy.digest == index.digest
    assert copy.seconds == pytest.approx(12.0)


def test_columns_are_read_by_name():
    index = make()
    assert isinstance(index.column("offset"), np.ndarray)
    assert index.column("offset").tolist() == [512, 1536, 512, 1536]
    assert index.column("duration").dtype == np.float64
    assert index.column("text")[3] == "text 3 ü"
    with pytest.raises(ShardIndexError, match="no column 'words'"):
        index.column("words")
    for position in (-1, 4):
        with pytest.raises(IndexError):
            index.row(position)


def test_empty_index_is_valid(store):
    make([], []).write(store)
    index = ShardIndex.read(store)
    assert len(index) == 0
    assert index.column("shard").dtype == np.int32
    assert index.column("id") == []


def test_columns_of_a_chunked_table_are_read():
    table = pa.concat_tables([make(ROWS[:2], SHARDS[:1]).table, make(ROWS[2:]).table])
    index = ShardIndex(table, SHARDS, {"payload": "flac"})
    assert index.row(3) == ROWS[3]
    assert index.column("offset").tolist() == [512, 1536, 512, 1536]


def test_digest_depends_on_content_only():
    index = make()
    assert make(metadata={"payload": "flac", "note": "x"}).digest == index.digest
    other_text = [{**row, "text": "other"} if row["id"] == "u2" else row for row in ROWS]
    other_shard = (SHARDS[0], dataclasses.replace(SHARDS[1], sha256="cc" * 32))
    digests = {
        index.digest,
        make(other_text).digest,
        make(shards=other_shard).digest,
        make(list(reversed(ROWS))).digest,
    }
    assert len(digests) == 4


def test_digest_of_existing_indexes_stays():
    """It is in the keys of stages: another one would make all of them run again."""
    lines = [*(f"{shard.sha256}\n" for shard in SHARDS), *(json.dumps([r["id"], r["text"]]) + "\n" for r in ROWS)]
    assert make().digest == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_only_requested_columns_are_read(store, monkeypatch):
    make().write(store)
    index = ShardIndex.read(store)
    loaded = []
    load = ParquetColumns.load
    monkeypatch.setattr(ParquetColumns, "load", lambda self, name: loaded.append(name) or load(self, name))
    for _ in range(2):
        assert index.column("shard").tolist() == [0, 0, 1, 1]
        assert index.values("id")[2].as_py() == "u2"
    assert loaded == ["shard", "id"]
    copy = pickle.loads(pickle.dumps(index))
    assert [copy.row(n) for n in range(4)] == ROWS


def test_text_in_several_chunks_is_read(store, monkeypatch):
    monkeypatch.setattr("storage.columns.ROWS", 3)
    make().write(store)
    index = ShardIndex.read(store)
    assert [index.row(n) for n in range(4)] == ROWS
    assert index.column("text") == [row["text"] for row in ROWS]
    assert isinstance(index.column("offset"), np.ndarray)
    table = pa.concat_tables([index.table.slice(0, 3), index.table.slice(3)])
    pieces = ShardIndex(table, SHARDS, {"payload": "flac"}).values("text")
    assert pieces.num_chunks == 2
    assert [pieces[n].as_py() for n in range(4)] == pieces.to_pylist() == index.column("text")


def test_codes_number_the_values_of_a_column(monkeypatch):
    monkeypatch.setattr("storage.columns.ROWS", 2)
    rows = [{**row, "domain": domain} for row, domain in zip(ROWS, ["b", "a", "c", "a"], strict=True)]
    codes, names = make(rows).codes("domain")
    assert [names[code] for code in codes] == ["b", "a", "c", "a"]
    assert sorted(names) == ["a", "b", "c"]
    assert make([], []).codes("domain")[1] == []
    with pytest.raises(ShardIndexError, match="no column 'words'"):
        make().codes("words")


def changed(position, **values):
    return [{**row, **values} if number == position else row for number, row in enumerate(ROWS)]


@pytest.mark.parametrize("position", [-1, 4])
def test_missing_row_is_named(position):
    with pytest.raises(IndexError, match=f"row {position} of an index of 4 utterances"):
        make().row(position)


def test_a_payload_may_be_empty_and_may_end_with_its_shard():
    make(changed(1, offset=10240 - 100)).validate()
    make(changed(1, offset=0, length=0)).validate()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (make(changed(1, id="u0")), "'u0'"),
        (make(changed(1, shard=1)), r"a\.tar has 2 utterances, the index 1"),
        (make(changed(1, shard=7)), "shard 7 of 2"),
        (make(changed(1, shard=-1)), "names shard"),
        (make(changed(1, duration=9.0)), "s, the index"),
        (make(changed(1, offset=10200)), "outside its shard"),
        (make(changed(1, offset=-1)), "outside its shard"),
        (make(changed(1, length=-1)), "outside its shard"),
        (make(changed(1, offset=10240 - 99)), "outside its shard"),
        (make(changed(1, text=None)), "empty value in column 'text'"),
        (make(metadata={}), "payload"),
        (make(shards=(SHARDS[0], dataclasses.replace(SHARDS[1], name="a.tar"))), "one name"),
        (ShardIndex(make().table.drop_columns(["text"]), SHARDS, {"payload": "flac"}), "columns"),
    ],
)
def test_refuses_to_write_contradictions(store, index, message):
    with pytest.raises(ShardIndexError, match=message):
        index.write(store)
    assert store.list() == []


def test_missing_index_is_an_error(store):
    with pytest.raises(ObjectMissingError, match=r"index\.parquet"):
        ShardIndex.read(store)


@pytest.mark.parametrize("content", [b"", b"PAR1 no parquet", b"\x00" * 4000])
def test_refuses_files_that_are_not_an_index(store, content):
    store.write("index.parquet", content)
    with pytest.raises(ShardIndexError, match=r"index\.parquet is (not a shard index|damaged) "):
        ShardIndex.read(store)


def test_refuses_a_foreign_parquet_file(store, tmp_path):
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "index.parquet")
    with pytest.raises(ShardIndexError, match="not a shard index"):
        ShardIndex.read(store)
