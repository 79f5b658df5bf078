"""Tables: CSV, TSV, JSON lines, Parquet or Arrow, one row per utterance."""

import csv
import io
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from configurable.files import replacing
from storage.corpora.base import (
    CorpusError,
    CorpusReader,
    RequiredValues,
    Utterance,
    as_confidence,
    as_field,
    as_number,
    as_text,
    as_whole_number,
    checked_times,
    is_file,
    named_file,
    read_json_lines,
    read_lines,
    why_no_file,
)
from storage.corpora.csv_rows import NumberedLines, check_width, find_separator, read_header, read_rows
from storage.corpora.embedded import (
    Cell,
    audio_columns,
    filled_cells,
    filled_rows,
    open_file,
    open_stream,
    plain_leaves,
    without_bytes,
)
from storage.corpora.file_ids import FileIds

if TYPE_CHECKING:
    import pyarrow.parquet as pq

KNOWN_COLUMNS: dict[str, tuple[str, ...]] = {
    "audio": ("audio", "path", "audio_filepath", "wav", "audio_path", "file"),
    "text": ("text", "sentence", "transcript", "transcription"),
    "speaker": ("speaker", "speaker_id", "client_id", "spk"),
    "id": ("id", "utt_id", "utterance_id"),
    "split": ("split",),
    "domain": ("domain",),
    "language": ("language", "lang", "locale"),
    "duration": ("duration",),
    "sample_rate": ("sample_rate",),
    "start": ("start", "offset"),
    "end": ("end",),
    "channel": ("channel",),
    "confidence": ("confidence",),
    "offset": ("byte_offset",),
    "length": ("byte_length",),
    "row": ("cell_row",),
    "column": ("cell_column",),
}
"""Column names of each field in public corpora; the first one present in the table is used."""
BINARY_TABLES = (".parquet", ".arrow")
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", *BINARY_TABLES)
"""File names of tables end in one of these."""
_BATCH_ROWS = 1024  # of a Parquet file that are in memory at once


class TableReader(CorpusReader):
    """Reads a table, or a folder with a `metadata.csv`, `.tsv`, `.jsonl` or `.parquet`.

    Audio paths are relative to the table. A Parquet or Arrow file may hold the audio itself, as bytes or as structures
    of bytes and path: then the path only names it, and a number in the column `id` is not taken, as it often is that of
    a sentence. The default id is the audio file's stem, with its folders where several files have that stem, and with
    the start time for a segment of a file. A row with `start` and `duration` but no `end` is a segment of that
    duration, as in NeMo's manifests. Audio inside of another file is at `byte_offset` and `byte_length` of a tar, or in
    `cell_row` and `cell_column` of a Parquet file, as `write_table` writes it.

    A CSV or TSV file may be separated by commas, semicolons, tabs or "|", which its header tells. Each line is a row or
    a problem; for cells with line breaks, see `storage.corpora.csv_rows`.

    Options:
        columns: column of the table for each field of `Utterance` that has an unusual name.
        encoding: that of a CSV, TSV or JSON lines file, such as `windows-1252`, if it is not one of the UTF encodings.
        where: required values by column, for example `{"part": "train"}`; other rows are skipped.
    """

    LAYOUT = (
        "CSV, TSV, JSON lines or Parquet, one row per utterance: audio path, text, and optionally speaker, id, split, …"
    )
    EXAMPLE: ClassVar[dict[str, str]] = {
        "metadata.csv": "audio,text,speaker,confidence\nwav/a.wav,good morning,ann,0.93\n"
        "wav/b.wav,good night,bob,0.41\n",
        "wav/a.wav": "",
        "wav/b.wav": "",
    }
    OPTIONS = frozenset({"columns", "where", "encoding"})
    CONFIDENCE = "the column `confidence`, or the one in `options: {columns: {confidence: NAME}}`"

    def __init__(
        self, path: str, *, corpus: str = "", domain: str = "", language: str = "en", **options: object
    ) -> None:
        super().__init__(path, corpus=corpus, domain=domain, language=language, **options)
        self.table = self._find_table()
        self._chosen = self._mapping("columns")
        self.where = RequiredValues(self.options.get("where"))
        self.file_id = FileIds(self.unnamed_audio)
        unknown = sorted(self._chosen.keys() - KNOWN_COLUMNS)
        if unknown:
            raise CorpusError(f"columns: there is no field {unknown[0]!r}: use {', '.join(KNOWN_COLUMNS)}")

    def _mapping(self, option: str) -> dict[str, str]:
        value = self.options.get(option) or {}
        if not isinstance(value, Mapping):
            raise CorpusError(f"option {option!r} is {value!r}: give a mapping such as {{'text': 'sentence'}}")
        return {str(name): str(item) for name, item in value.items()}

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether it is a table, or a folder with a table named `metadata`."""
        if root.is_file():
            return root.suffix.lower() in TABLE_SUFFIXES
        return any((root / f"metadata{suffix}").is_file() for suffix in TABLE_SUFFIXES)

    def _find_table(self) -> Path:
        if self.root.is_dir():
            for suffix in TABLE_SUFFIXES:
                if (self.root / f"metadata{suffix}").is_file():
                    return self.root / f"metadata{suffix}"
            raise CorpusError(f"{self.root} has no metadata.csv, .tsv, .jsonl or .parquet: name the table itself")
        if self.root.suffix.lower() not in TABLE_SUFFIXES:
            raise CorpusError(f"{self.root} is not a table: its name must end in {', '.join(TABLE_SUFFIXES)}")
        if not is_file(self.root):
            raise CorpusError(f"{self.root} {why_no_file(self.root)}")
        return self.root

    def _utterances(self) -> Iterator[Utterance]:
        for number, row in self.numbered_rows():
            if isinstance(row, str):
                self._problem(f"{self.table.name}:{number}", "bad-line", f"line {number}: {row}")
                continue
            utterance = self._utterance(number, row)
            if utterance is not None:
                yield utterance
        if self.where.alone:
            self.where.check(self.table)

    def _utterance(self, number: int, row: dict[str, Any]) -> Utterance | None:
        values = {field: self._value(field, row) for field in KNOWN_COLUMNS}
        column, cell = self._cell(row)
        name = values["audio"] or "" if cell is None else self._name_of_cell(cell)
        label = self._own_id(row) or self.file_id(name) or f"{self.table.name}:{number}"
        if cell is not None:
            values["audio"] = str(self.table) if cell.inside else cell.path
        if not values["audio"]:
            self._problem(label, "missing-audio", f"line {number} of {self.table.name} names no audio")
            return None
        if values["text"] is None:
            self._problem(label, "missing-transcript", f"line {number} of {self.table.name} has no text")
            return None
        audio = self._resolve(values["audio"])
        if isinstance(audio, Path) and not is_file(audio):
            self._problem(label, "missing-audio", f"line {number} of {self.table.name}: {audio} {why_no_file(audio)}")
            return None
        try:
            inside = cell is not None and cell.inside
            place = {"row": cell.row, "column": column} if cell is not None and inside else _place_in_file(values)
            return self._build(values, label, str(audio), place)
        except ValueError as error:
            self._problem(label, "bad-line", f"line {number}: {error}")
            return None

    def _build(self, values: dict[str, str | None], label: str, audio: str, place: dict[str, Any]) -> Utterance:
        given, end = as_number("start", values["start"]), as_number("end", values["end"])
        duration = as_number("duration", values["duration"])
        if end is None and given is not None and duration is not None:
            end = given + duration
        start, end = checked_times(given or 0.0, end)
        rate, channel = (as_whole_number(name, values[name]) for name in ("sample_rate", "channel"))
        return Utterance(
            id=label if values["id"] or not start else f"{label}-{round(start * 1000):08d}",
            audio=audio,
            text=values["text"] or "",
            speaker=values["speaker"] or "",
            corpus=self.corpus,
            domain=values["domain"] or self.domain,
            language=values["language"] or self.language,
            duration=duration,
            sample_rate=rate,
            start=start,
            end=end,
            channel=channel,
            split=values["split"] or None,
            confidence=as_confidence(values["confidence"]),
            **place,
        )

    def _cell(self, row: dict[str, Any]) -> tuple[str, Cell | None]:
        """The column and the cell with a row's audio; None if the row names a file."""
        names = (self._chosen["audio"],) if "audio" in self._chosen else KNOWN_COLUMNS["audio"]
        for name in names:
            if isinstance(value := row.get(name), Cell):
                return name, value
            if as_field(value):
                return name, None
        others = () if "audio" in self._chosen else row.items()
        return next(((name, value) for name, value in others if isinstance(value, Cell)), ("", None))

    def _name_of_cell(self, cell: Cell) -> str:
        """A name for the audio in a row: that of its file, with table and row in place of folders."""
        table = f"{self.table.parent.name}/{self.table.stem}".replace(".", "-")
        name = posixpath.basename(cell.path)
        return f"{table}/{cell.row}/{name}" if name else f"{table}-{cell.row}"

    def _own_id(self, row: dict[str, Any]) -> str | None:
        """The id that a row gives; a number is not one if the row holds audio, and nobody chose the column."""
        named = self._value("id", row)
        number = any(isinstance(row.get(name), int | float) for name in KNOWN_COLUMNS["id"])
        return None if number and "id" not in self._chosen and self._cell(row)[1] is not None else named

    def _value(self, field: str, row: dict[str, Any]) -> str | None:
        names = (self._chosen[field],) if field in self._chosen else KNOWN_COLUMNS[field]
        parse = as_text if field == "text" else as_field
        return next((text for name in names if (text := parse(row.get(name))) is not None), None)

    def _resolve(self, audio: str) -> Path | str:
        return audio if "://" in audio else named_file(self.table.parent, audio)

    def files(self) -> Iterator[Path]:
        """Yield the table and the audio files of the rows selected by `where`."""
        yield self.table
        for _, row in self.numbered_rows():
            if isinstance(row, str):
                continue
            _, cell = self._cell(row)
            audio = self._value("audio", row) if cell is None else "" if cell.inside else cell.path
            path = self._resolve(audio) if audio else None
            if isinstance(path, Path):
                yield path

    def unnamed_audio(self) -> Iterator[str]:
        """Names of the audio of the rows without an id."""
        for _, row in self.numbered_rows():
            if not isinstance(row, str) and not self._own_id(row):
                _, cell = self._cell(row)
                yield self._value("audio", row) or "" if cell is None else self._name_of_cell(cell)

    def numbered_rows(self) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """Yield line number and row; for a bad row, a description of the error."""
        kinds = {
            ".jsonl": lambda: read_json_lines(self.table, self.encoding),
            ".parquet": self._parquet_rows,
            ".arrow": self._arrow_rows,
        }
        for number, row in kinds.get(self.table.suffix.lower(), self._text_rows)():
            if isinstance(row, str) or self.where.matched_by(row):
                yield number, row

    def _parquet_rows(self) -> Iterator[tuple[int, dict[str, Any] | str]]:
        import pyarrow as pa

        try:
            with open_file(self.table) as file:
                audio, leaves = audio_columns(file.schema_arrow), plain_leaves(file.schema_arrow)
                self._check_header(file.schema_arrow.names, inside=bool(audio))
                number = 0
                for group in range(file.num_row_groups):
                    filled = {name: filled_rows(file, column, group) for name, column in audio.items()}
                    for row in _rows_of_group(file, group, leaves):
                        for name, cells in filled.items():
                            part = row.get(name)
                            path = as_field(part.get("path")) if isinstance(part, dict) else None
                            row[name] = Cell(number, path or "", next(cells))
                        number += 1
                        yield number, row
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise CorpusError(f"{self.table} is not a readable Parquet file: {error}") from error

    def _arrow_rows(self) -> Iterator[tuple[int, dict[str, Any] | str]]:
        import pyarrow as pa

        try:
            batches = open_stream(self.table)
            audio = audio_columns(batches.schema)
            self._check_header(batches.schema.names, inside=bool(audio))
            number = 0
            for batch in batches:
                rows = without_bytes(batch)
                filled = {name: filled_cells(batch.column(name)) for name in audio}
                for place, row in enumerate(rows):
                    for name, cells in filled.items():
                        part = row.get(name)
                        path = as_field(part.get("path")) if isinstance(part, dict) else None
                        row[name] = Cell(number, path or "", cells[place])
                    number += 1
                    yield number, row
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise CorpusError(f"{self.table} is not a readable stream of Arrow batches: {error}") from error

    def _text_rows(self) -> Iterator[tuple[int, dict[str, Any] | str]]:
        lines, separator, header = self.opened()
        width = len(self._check_header(header))
        for number, cells in read_rows(lines, width, separator):
            wrong = cells if isinstance(cells, str) else check_width(cells, width)
            yield number, wrong or dict(zip(header, cells, strict=True))

    def opened(self) -> tuple[NumberedLines, str, list[str]]:
        """The lines of a text after its header, what separates its cells, and the names of its columns."""
        lines = _split_returns(read_lines(self.table, self.encoding))
        first = next(lines, (1, ""))
        known = {*chain.from_iterable(KNOWN_COLUMNS.values()), *self._chosen.values(), *self.where.values}
        separator = find_separator(first[1] or "", known, "\t" if self.table.suffix.lower() == ".tsv" else ",")
        try:
            header = read_header(iter([first]), separator)
        except ValueError as error:
            raise CorpusError(f"{self.table}, line 1: {error}") from error
        return lines, separator, header

    def _check_header(self, header: list[str], inside: bool = False) -> list[str]:
        """The names of the columns; `inside` says whether some hold audio."""
        for field in ("audio", "text", *self._chosen):
            chosen, names = self._chosen.get(field), KNOWN_COLUMNS[field]
            if chosen is not None and chosen not in header:
                raise CorpusError(
                    f"options.columns.{field}: {chosen!r} is not a column of {self.table}{_instead(chosen, header)}"
                )
            if chosen is None and not set(names) & set(header) and not (inside and field == "audio"):
                raise CorpusError(
                    f"{self.table} has no column for {field} ({' or '.join(names)}), only {', '.join(header)}: "
                    f"rename the right one to {names[0]}, or name it in the configuration: "
                    f"options: {{columns: {{{field}: NAME}}}}{misspelled(header, names)}"
                )
        if twice := [name for name, count in Counter(header).items() if name and count > 1]:
            raise CorpusError(f"{self.table} has the column {twice[0]!r} twice: rename or remove one of them")
        missing = sorted(self.where.values.keys() - set(header))
        if missing:
            raise CorpusError(f"{self.table} has no column {missing[0]!r} to select by{_instead(missing[0], header)}")
        return header


def near_column(name: str, columns: Iterable[str]) -> str:
    """The column that a misspelled name means; empty if none is similar enough."""
    return next(iter(get_close_matches(name.lower(), columns, 1, cutoff=0.75)), "")


def misspelled(header: Iterable[str], names: Iterable[str]) -> str:
    """End of a message about a missing column: which name a column of the table may misspell; empty if none."""
    near = next(((name, near_name) for name in header if (near_name := near_column(name, names))), None)
    return f"; {near[0]!r}: did you mean {near[1]!r}?" if near else ""


def _instead(name: str, header: list[str]) -> str:
    near = near_column(name, header)
    return f"; did you mean {near!r}?" if near else f", which has only {', '.join(header)}"


def first_rows(path: Path, count: int, encoding: str = "") -> list[dict[str, Any]]:
    """The first rows of a table with any columns; rows that cannot be read are left out.

    Args:
        path: The table.
        count: Maximum number of lines to read.
        encoding: That of a table of text; empty for one of the UTF encodings.

    Raises:
        CorpusError: If it is not a readable table.
    """
    rows = (row for _, row in islice(_AnyTable(str(path), encoding=encoding).numbered_rows(), count))
    return [row for row in rows if isinstance(row, dict)]


def table_shape(path: Path) -> tuple[str, list[str]]:
    """What separates the cells of a CSV or TSV file, and the names of its columns.

    Raises:
        CorpusError: If its header cannot be read.
    """
    return _AnyTable(str(path)).opened()[1:]


class _AnyTable(TableReader):
    """A table whose columns need not be those of a corpus."""

    def _check_header(self, header: list[str], inside: bool = False) -> list[str]:
        return header


def _place_in_file(values: Mapping[str, str | None]) -> dict[str, Any]:
    """Where in its file the audio of a row is, if it is a range of bytes or a cell of another table.

    Raises:
        ValueError: A number is none.
    """
    offset, length, row = (as_whole_number(name, values[name]) for name in ("offset", "length", "row"))
    if offset is not None and length is not None:
        return {"offset": offset, "length": length}
    return {"row": row, "column": values["column"]} if row is not None and values["column"] else {}


def write_table(
    path: Path, rows: Iterable[tuple[Utterance, Mapping[str, object]]], fields: Sequence[str], more: Sequence[str] = ()
) -> None:
    """Write a CSV table that `TableReader` reads as the same utterances; the file appears when it is complete.

    Audio is named, not copied: by absolute paths, and with the place inside of a tar or a Parquet file.

    Args:
        path: The file; its folder exists.
        rows: Utterances, each with what it has in further columns.
        fields: Fields of `KNOWN_COLUMNS` to write.
        more: Names of the further columns.
    """
    with replacing(path, sync=True) as raw:
        file = io.TextIOWrapper(io.BufferedWriter(cast(io.RawIOBase, raw)), "utf-8", "backslashreplace", newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(KNOWN_COLUMNS[name][0] for name in fields), *more])
        for utterance, others in rows:
            values = vars(utterance) | {"text": " ".join(utterance.text.split()), "start": utterance.start or None}
            writer.writerow([*(values[name] for name in fields), *(others.get(name) for name in more)])
        file.flush()
        file.detach().detach()  # `replacing` closes it


def _rows_of_group(file: "pq.ParquetFile", group: int, leaves: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of a row group, with some of their leaves."""
    if not leaves:  # of columns with bytes only
        yield from ({} for _ in range(file.metadata.row_group(group).num_rows))
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=leaves) if leaves else ():
        yield from batch.to_pylist()


def _split_returns(lines: NumberedLines) -> NumberedLines:
    """Split lines at single carriage returns, too, and renumber them."""
    number = 0
    for _, line in lines:
        for part in (line,) if line is None else line.split("\r"):
            number += 1
            yield number, part
