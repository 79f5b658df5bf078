"""Columns of a table and of a file: the same contract, and limits for a large index."""

import pickle
from abc import ABC, abstractmethod

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import columns
from storage.columns import ParquetColumns, TableColumns, collect_columns, open_columns, write_columns
from storage.objects import ObjectStore

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


def parts(count, each=3):
    return [
        pa.table({"id": [f"u{n}" for n in numbers], "n": list(numbers)}, schema=SCHEMA)
        for numbers in (range(begin, min(begin + each, count)) for begin in range(0, count, each))
    ]


class ColumnsContract(ABC):
    """What both kinds of columns promise."""

    @abstractmethod
    def make(self, table, folder):
        """Columns of a table."""

    @pytest.mark.parametrize("count", [0, 1, 100])
    def test_values_equal_those_of_the_table(self, tmp_path, monkeypatch, count):
        monkeypatch.setattr(columns, "ROWS", 16)
        table = pa.concat_tables([SCHEMA.empty_table(), *parts(count)])
        opened = self.make(table, tmp_path)
        assert (opened.num_rows, opened.schema) == (count, SCHEMA)
        assert opened.table().equals(table)
        assert opened.load("n").to_pylist() == list(range(count))
        sizes = [batch.num_rows for batch in opened.batches(["id"])]
        assert sum(sizes) == count
        assert max(sizes, default=0) <= 16
        assert len(sizes) <= count // 16 + 1
        ids = [name for batch in opened.batches(["id"]) for name in batch.column(0).to_pylist()]
        assert ids == table.column("id").to_pylist()
        assert pickle.loads(pickle.dumps(opened)).table().equals(table)

    def test_empty_values_are_counted(self, tmp_path):
        columns = self.make(pa.table({"id": ["a", None, None], "n": [1, 2, 3]}, schema=SCHEMA), tmp_path)
        assert (columns.empty_values("id"), columns.empty_values("n")) == (2, 0)


class TestTableColumns(ColumnsContract):
    def make(self, table, folder):
        return TableColumns(table)


class TestParquetColumns(ColumnsContract):
    def make(self, table, folder):
        store = ObjectStore(folder / "store")
        write_columns(store, "x.parquet", TableColumns(table), {b"key": b"value"})
        columns = open_columns(store, "x.parquet")
        assert columns.metadata[b"key"] == b"value"
        store.delete("x.parquet")  # it stays open
        return columns


class TestColumnsOfAnotherWriter(ColumnsContract):
    def make(self, table, folder):
        # one row group, and no statistics to trust
        pq.write_table(table, folder / "x.parquet", write_statistics=False)
        return ParquetColumns(folder / "x.parquet")


class TestCollectedColumns(ColumnsContract):
    def make(self, table, folder):
        pieces = [table.slice(begin, 7) for begin in range(0, len(table), 7)]
        return collect_columns(iter(pieces), SCHEMA)


def test_long_text_is_mapped_from_an_unlinked_file(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "_MAPPED_ROWS", 50)
    pq.write_table(pa.concat_tables(parts(100)), tmp_path / "x.parquet", row_group_size=16)
    opened = ParquetColumns(tmp_path / "x.parquet")
    before = pa.total_allocated_bytes()
    text = opened.load("id")
    assert pa.total_allocated_bytes() - before < 500
    assert text.to_pylist() == [f"u{n}" for n in range(100)]
    assert text[77].as_py() == "u77"


def test_many_rows_are_collected_on_disk_and_few_in_memory(monkeypatch):
    monkeypatch.setattr(columns, "ROWS", 16)
    assert isinstance(collect_columns(parts(15), SCHEMA), TableColumns)
    assert isinstance(collect_columns(parts(100), SCHEMA), ParquetColumns)


def test_a_remote_file_leaves_no_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    store = ObjectStore("memory://columns-test")
    write_columns(store, "x.parquet", TableColumns(pa.concat_tables(parts(10))), {})
    columns = open_columns(store, "x.parquet")
    assert list(tmp_path.iterdir()) == []
    assert columns.load("n").to_pylist() == list(range(10))
    store.delete_tree("")
