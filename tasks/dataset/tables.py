"""Parquet tables, read and written as a whole or as a stream, so that millions of rows are never in memory at once."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.intact import open_parquet, readable
from storage.objects import ObjectStore
from storage.stages import StageOutput

Row = dict[str, Any]
ROWS = 1 << 15
"""Rows in a row group, and in a batch when reading: about 10 MB of utterances."""


def write_table(store: ObjectStore, name: str, rows: list[Row], schema: pa.Schema) -> None:
    """Write rows as one Parquet file, atomically."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer, write_page_checksum=True)
    store.write(name, buffer.getvalue())


def read_table(source: ObjectStore | StageOutput, name: str) -> list[Row]:
    """Read the rows of a Parquet file; a stage's output is checked against its record.

    Raises:
        DamagedObjectError: If the file is damaged.
    """
    data = source.read(name)
    with readable(source.join(name)):
        table = pq.read_table(io.BytesIO(data), page_checksum_verification=True)
        rows: list[Row] = table.to_pylist()
    return rows


class TableWriter:
    """Writes a local Parquet file row by row; publish the file after closing it.

    Args:
        path: The file.
        schema: Its columns.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema = path, schema
        self.count = 0
        """Rows so far."""
        self._rows: list[Row] = []
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)

    def add(self, row: Row) -> None:
        """Add a row."""
        self._rows.append(row)
        self.count += 1
        if len(self._rows) >= ROWS:
            self._flush()

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add the rows of an Arrow batch with the table's columns."""
        self._flush()
        self.count += batch.num_rows
        self._writer.write_batch(batch.select(self.schema.names).cast(self.schema))

    def close(self) -> None:
        """Write the remaining rows and complete the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self.schema))
            self._rows = []

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def batches(
    path: Path, columns: Sequence[str] | None = None, where: dict[str, str] | None = None, url: str = ""
) -> Iterator[Any]:
    """Read a local Parquet file in batches of at most `ROWS` rows.

    Args:
        path: The file.
        columns: Columns to read; all by default.
        where: Only rows whose columns have these values.
        url: Name of the file in messages; by default the path.

    Yields:
        Arrow record batches.

    Raises:
        DamagedObjectError: If the file is damaged.
    """
    wanted = None if columns is None else list(dict.fromkeys([*columns, *(where or {})]))
    url = url or str(path)
    with readable(url):
        file = open_parquet(path)
    with file:
        source = file.iter_batches(batch_size=ROWS, columns=wanted, use_threads=False)
        while True:
            with readable(url):
                batch = next(source, None)
            if batch is None:
                return
            for column, value in (where or {}).items():
                batch = batch.filter(pc.equal(batch.column(column), value))
            yield batch if columns is None else batch.select(list(columns))


def iter_table(
    source: ObjectStore | StageOutput,
    name: str,
    folder: Path,
    columns: Sequence[str] | None = None,
    where: dict[str, str] | None = None,
) -> Iterator[Row]:
    """Iterate over the rows of a stored Parquet file, with one batch in memory at a time.

    Args:
        source: Store of the file, or a stage's output, whose files are checked against its record.
        name: Name of the file.
        folder: Local folder for a copy if the store is remote; the caller removes it.
        columns: Columns to read; all by default.
        where: Only rows whose columns have these values.

    Raises:
        DamagedObjectError: If the file is damaged.
    """
    for batch in batches(source.fetch(name, folder), columns, where, source.join(name)):
        yield from batch.to_pylist()
