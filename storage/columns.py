"""The columns of an index: a table in memory, or a Parquet file whose columns are read on demand.

An index of ten million utterances takes 1.5 GB in memory and about 0.3 GB on disk, and no reader needs all columns.
"""

import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from storage.intact import open_parquet, readable
from storage.objects import ObjectStore

ROWS = 1 << 16
"""Number of rows per row group and per batch."""
_MAPPED_ROWS = 1 << 20
"""From this many rows on, text columns are memory-mapped instead of loaded."""


class Columns(Protocol):
    """Named columns of equal length."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    def load(self, name: str) -> pa.ChunkedArray:
        """Load a whole column."""

    def empty_values(self, name: str) -> int:
        """Number of missing values in a column."""

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns in batches of at most `ROWS` rows."""

    def table(self) -> pa.Table:
        """All columns in memory."""


class TableColumns:
    """Columns in memory.

    Args:
        table: The table.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.schema: pa.Schema = table.schema
        self.num_rows = int(table.num_rows)

    def load(self, name: str) -> pa.ChunkedArray:
        """Load a whole column."""
        return self._table.column(name)

    def empty_values(self, name: str) -> int:
        """Number of missing values in a column."""
        return int(self._table.column(name).null_count)

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns in batches of at most `ROWS` rows."""
        wanted = self._table.select(list(names))
        for begin in range(0, self.num_rows, ROWS):
            # the parts of shards are smaller than a batch
            yield from wanted.slice(begin, ROWS).combine_chunks().to_batches()

    def table(self) -> pa.Table:
        """The table."""
        return self._table


class ParquetColumns:
    """Columns of a Parquet file, which stays open, so it may be replaced or deleted. Pickled as a table.

    Args:
        path: A local file.
        url: Name in error messages; the path by default.

    Raises:
        DamagedObjectError: It is not a Parquet file; damaged columns raise this error when they are read.
    """

    def __init__(self, path: Path, url: str = "") -> None:
        self._lock = threading.Lock()
        self._url = url or str(path)
        with readable(self._url):
            self._file = open_parquet(path)
        self.schema: pa.Schema = self._file.schema_arrow.remove_metadata()
        self.metadata: dict[bytes, bytes] = self._file.schema_arrow.metadata or {}
        self.num_rows = int(self._file.metadata.num_rows)

    def load(self, name: str) -> pa.ChunkedArray:
        """Load a whole column; a long text column is memory-mapped from an unnamed temporary file instead."""
        if self.num_rows >= _MAPPED_ROWS and pa.types.is_string(self.schema.field(name).type):
            return _mapped(self.batches([name]), pa.schema([self.schema.field(name)])).column(name)
        return pa.Table.from_batches(self.batches([name]), pa.schema([self.schema.field(name)])).column(name)

    def empty_values(self, name: str) -> int:
        """Number of missing values in a column, from the file's statistics if it has them."""
        place, count = self.schema.get_field_index(name), 0
        for group in range(self._file.metadata.num_row_groups):
            statistics = self._file.metadata.row_group(group).column(place).statistics
            if statistics is None or not statistics.has_null_count:
                return sum(batch.column(0).null_count for batch in self.batches([name]))
            count += int(statistics.null_count)
        return count

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns in batches of at most `ROWS` rows."""
        for group in range(self._file.metadata.num_row_groups):
            with self._lock, readable(self._url):
                # our row groups are one batch each; those of other writers may be larger
                table = self._file.read_row_group(group, list(names), use_threads=False)
            yield from table.to_batches(max_chunksize=ROWS)

    def table(self) -> pa.Table:
        """All columns in memory."""
        with self._lock, readable(self._url):
            return self._file.read(use_threads=False).replace_schema_metadata(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return TableColumns, (self.table(),)


def _mapped(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    with tempfile.TemporaryDirectory(prefix="starling-index-") as folder:
        path = str(Path(folder) / "columns.arrow")
        with pa.ipc.new_file(path, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return pa.ipc.open_file(pa.memory_map(path)).read_all()


def collect_columns(tables: Iterable[pa.Table], schema: pa.Schema) -> Columns:
    """Concatenate tables, consumed one by one; large results go to an unnamed file on the local disk."""
    waiting, rows, writer = [schema.empty_table()], 0, None
    with tempfile.TemporaryDirectory(prefix="starling-index-") as folder, ExitStack() as stack:
        path = Path(folder) / "columns.parquet"
        for table in tables:
            waiting.append(table)
            rows += table.num_rows
            if rows >= ROWS:
                writer = writer or stack.enter_context(pq.ParquetWriter(path, schema, compression="zstd"))
                joined, whole = pa.concat_tables(waiting), rows // ROWS * ROWS
                writer.write_table(joined.slice(0, whole), row_group_size=ROWS)
                waiting, rows = [joined.slice(whole)], rows - whole
        rest = pa.concat_tables(waiting)
        if writer is None:
            return TableColumns(rest)
        writer.write_table(rest)
        stack.close()
        return ParquetColumns(path)


def open_columns(store: ObjectStore, name: str) -> ParquetColumns:
    """Open the columns of a Parquet file in a store; a remote file is copied to an unnamed file on the local disk.

    Raises:
        ObjectMissingError: The object does not exist.
        DamagedObjectError: It is not a Parquet file.
    """
    with tempfile.TemporaryDirectory(prefix="starling-index-") as folder:
        return ParquetColumns(store.fetch(name, Path(folder)), store.join(name))


def write_columns(store: ObjectStore, name: str, columns: Columns, metadata: dict[bytes, bytes]) -> None:
    """Write columns to a Parquet file, batch by batch; published atomically."""
    schema = columns.schema.with_metadata(metadata)
    options = {"compression": "zstd", "write_page_checksum": True}
    with store.create(name) as file, pq.ParquetWriter(file, schema, **options) as writer:
        for batch in columns.batches(schema.names):
            writer.write_batch(batch, row_group_size=ROWS)
