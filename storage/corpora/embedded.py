"""Audio inside Parquet and Arrow files, as Hugging Face data sets store it: a column `audio` of {bytes, path}, or of
bytes.

A cell of an Arrow file is read from the file, which is mapped into memory. One of a Parquet file cannot be addressed as
a range of bytes of the file, since pages are compressed. So an utterance refers to a row and a column, and `read_cell`
decodes the row group's pages up to it; rows that are read in order are read in one pass. Memory holds a page of a row
group (the writer decides how long pages are) and a few megabytes of cells.
"""

import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BUFFER = 1 << 20  # bytes of a column chunk that are read at once
_BATCH_BYTES = 2 << 20  # of decoded cells, about: some utterances of 10 s
_MOST_ROWS = 64  # of a batch: sizes in the file's metadata may be wrong
_KEPT = 4
"""Batches that a cursor keeps: threads read rows nearly, but not exactly in order."""
_MOST_CURSORS = 4  # open files: each keeps a page and some batches in memory


class Cell(NamedTuple):
    """A cell of a table that holds audio.

    Attributes:
        row: number of its row, from 0.
        path: the file that the audio was made from; empty if the table does not say.
        inside: whether the table holds the audio itself, not only the path.
    """

    row: int
    path: str
    inside: bool = True


class CellError(ValueError):
    """A cell that cannot be read."""


class AudioColumn(NamedTuple):
    """A column with audio: the leaf with the encoded bytes, and that with the path ("" if there is none)."""

    data: str
    path: str


def open_file(path: Path) -> "pq.ParquetFile":
    """Open a Parquet file for reading page by page.

    Raises:
        pyarrow.ArrowException, OSError: it is not a readable Parquet file.
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)


def audio_columns(schema: "pa.Schema") -> dict[str, AudioColumn]:
    """The columns with audio, by name: of bytes, or of structures with bytes."""
    columns = {}
    for column in schema:
        if _is_binary(column.type):
            columns[column.name] = AudioColumn(column.name, "")
        elif _is_struct(column.type):
            data = [part.name for part in column.type if _is_binary(part.type)]
            path = f"{column.name}.path" if any(part.name == "path" for part in column.type) else ""
            if data:
                columns[column.name] = AudioColumn(f"{column.name}.{data[0]}", path)
    return columns


def plain_leaves(schema: "pa.Schema") -> list[str]:
    """The leaves that are neither bytes nor lists: text, numbers, and those of structures."""
    leaves = []
    for column in schema:
        parts = [(f"{column.name}.{p.name}", p.type) for p in column.type] if _is_struct(column.type) else []
        for name, kind in parts or [(column.name, column.type)]:
            if not (_is_binary(kind) or _is_nested(kind)):
                leaves.append(name)
    return leaves


def _is_struct(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind))


def _is_nested(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_nested(kind))


def _is_binary(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def open_stream(path: Path) -> "pa.RecordBatchStreamReader":
    """Open a stream of Arrow batches, such as `save_to_disk` of Hugging Face's `datasets` writes, mapped into memory.

    A damaged batch may point beyond its memory: validate it before its cells are read.

    Raises:
        pyarrow.ArrowException, OSError: it is not a readable one.
    """
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(os.fspath(path)))


def without_bytes(batch: "pa.RecordBatch") -> list[dict[str, Any]]:
    """The rows of an Arrow batch without bytes and lists: text, numbers, and structures of those."""
    batch.validate(full=True)
    columns = {}
    for field, cells in zip(batch.schema, batch.columns, strict=True):
        if _is_struct(field.type):
            parts = [part for part in field.type if not (_is_binary(part.type) or _is_nested(part.type))]
            leaves = {part.name: cells.field(part.name).to_pylist() for part in parts}
            columns[field.name] = [{name: values[row] for name, values in leaves.items()} for row in range(len(cells))]
        elif not (_is_binary(field.type) or _is_nested(field.type)):
            columns[field.name] = cells.to_pylist()
    return [{name: values[row] for name, values in columns.items()} for row in range(batch.num_rows)]


def filled_cells(cells: "pa.Array") -> list[bool]:
    """Whether each cell of a column with audio has bytes."""
    valid = cells.is_valid().to_pylist()
    if not _is_struct(cells.type):
        return list(valid)
    inside = _bytes_of(cells).is_valid().to_pylist()
    return [own and part for own, part in zip(valid, inside, strict=True)]


def _bytes_of(cells: "pa.Array") -> "pa.Array":
    """The bytes of a column with audio."""
    if not _is_struct(cells.type):
        return cells
    return cells.field(next(part.name for part in cells.type if _is_binary(part.type)))


def filled_rows(file: "pq.ParquetFile", column: AudioColumn, group: int) -> Iterator[bool]:
    """Whether each row of a row group has bytes; decodes them only if the file does not say it for the whole group."""
    about = file.metadata.row_group(group)
    leaf = next(about.column(n) for n in range(about.num_columns) if about.column(n).path_in_schema == column.data)
    nulls = leaf.statistics.null_count if leaf.statistics is not None and leaf.statistics.has_null_count else None
    if nulls in (0, about.num_rows):
        yield from (nulls == 0 for _ in range(about.num_rows))
    else:
        yield from (cell is not None for batch in _cells(file, column.data, group) for cell in batch)


def _cells(file: "pq.ParquetFile", leaf: str, group: int) -> Iterator[list[bytes | None]]:
    """The cells of a row group, in batches of a few megabytes."""
    about = file.metadata.row_group(group)
    rows = max(1, min(_MOST_ROWS, _BATCH_BYTES * about.num_rows // max(1, about.total_byte_size)))
    for batch in file.iter_batches(rows, row_groups=[group], columns=[leaf], use_threads=False):
        cells = batch.column(0)
        if _is_struct(cells.type):
            cells = cells.flatten()[0]
        yield cells.to_pylist()


class _Mapped:
    """A column with audio of an Arrow file, which is mapped into memory."""

    def __init__(self, path: str, column: str) -> None:
        self.key, self.process = (path, column), os.getpid()
        batches = open_stream(Path(path))
        if column not in audio_columns(batches.schema):
            raise CellError(f"{path} has no column {column!r} with audio")
        self._batches = [batch.column(column) for batch in batches]
        for cells in self._batches:
            cells.validate(full=True)
        self._begins = list(accumulate(map(len, self._batches), initial=0))

    def reaches(self, row: int) -> bool:
        """Whether a row can be read: always."""
        return True

    def read(self, row: int) -> bytes | None:
        """The content of a cell.

        Raises:
            CellError: there is no such row.
        """
        if not 0 <= row < self._begins[-1]:
            raise CellError(f"{self.key[0]} has {self._begins[-1]} rows: there is no row {row}")
        number = bisect_right(self._begins, row) - 1
        place, cells = row - self._begins[number], self._batches[number]
        content: bytes | None = _bytes_of(cells)[place].as_py() if cells[place].is_valid else None
        return content


class _Cursor:
    """A position in a column of a Parquet file, from which rows can be read in ascending order."""

    def __init__(self, path: str, column: str) -> None:
        self.key, self.process = (path, column), os.getpid()
        self._file = open_file(Path(path))
        audio = audio_columns(self._file.schema_arrow).get(column)
        if audio is None:
            raise CellError(f"{path} has no column {column!r} with audio")
        self._leaf = audio.data
        sizes = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
        self._begins = list(accumulate(sizes, initial=0))
        self._group, self._next = -2, 0  # of no row group, nor before the first
        self._batches: Iterator[list[bytes | None]] = iter(())
        self._kept: deque[tuple[int, list[bytes | None]]] = deque(maxlen=_KEPT)

    def reaches(self, row: int) -> bool:
        """Whether a row is kept, or further on in the row group or in the next one."""
        return self._find(row) is not None or (
            row >= self._next and self._group <= self._group_of(row) <= self._group + 1
        )

    def read(self, row: int) -> bytes | None:
        """The content of a cell.

        Raises:
            CellError: there is no such row.
        """
        if not 0 <= row < self._begins[-1]:
            raise CellError(f"{self.key[0]} has {self._begins[-1]} rows: there is no row {row}")
        if (batch := self._find(row)) is None:
            batch = self._advance(row)
        begin, cells = batch
        return cells[row - begin]

    def _advance(self, row: int) -> tuple[int, list[bytes | None]]:
        """Read on to the batch with a row."""
        group = self._group_of(row)
        if group != self._group or row < self._next:
            self._group, self._next = group, self._begins[group]
            self._batches = _cells(self._file, self._leaf, group)
        while row >= self._next:
            batch = next(self._batches, None)
            if not batch:
                raise CellError(f"{self.key[0]} is truncated at row {self._next}")
            self._kept.append((self._next, batch))
            self._next += len(batch)
        return self._kept[-1]

    def _find(self, row: int) -> tuple[int, list[bytes | None]] | None:
        return next((batch for batch in self._kept if batch[0] <= row < batch[0] + len(batch[1])), None)

    def _group_of(self, row: int) -> int:
        return bisect_right(self._begins, row) - 1


_cursors: list[_Cursor | _Mapped] = []
_lock = threading.Lock()


def read_cell(path: str, column: str, row: int) -> bytes:
    """The encoded audio in a cell of a Parquet or Arrow file; fast if rows are read in about ascending order.

    Args:
        path: the file.
        column: the column's name.
        row: the row, from 0.

    Raises:
        CellError: the cell or the file cannot be read, or the cell is empty.
    """
    import pyarrow as pa

    try:
        with _lock:
            cursor = _cursor(path, column, row)
            _cursors.append(cursor)  # the last used one is last
            del _cursors[:-_MOST_CURSORS]
            content = cursor.read(row)
    except (pa.ArrowException, OSError) as error:
        with _lock:
            _cursors[:] = [other for other in _cursors if other.key != (path, column)]
        raise CellError(f"row {row} of {path} cannot be read: {error}") from error
    if content is None:
        raise CellError(f"row {row} of {path} has no audio in its column {column!r}")
    return content


def _cursor(path: str, column: str, row: int) -> _Cursor | _Mapped:
    """Take the cursor that reaches a row from the list, or make one."""
    for cursor in _cursors:
        # a forked process shares the position of its parent's files
        if cursor.key == (path, column) and cursor.process == os.getpid() and cursor.reaches(row):
            _cursors.remove(cursor)
            return cursor
    return _Mapped(path, column) if path.lower().endswith(".arrow") else _Cursor(path, column)
