"""Guesses which columns of a table hold the audio, the text, the speaker and the set."""

import os
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from configurable.wording import nearest, printable
from storage.corpora.base import RECORDING_SUFFIXES, SET_OF_SPLIT, CorpusError, guess_encoding, is_file, named_file
from storage.corpora.embedded import Cell
from storage.corpora.table import BINARY_TABLES, KNOWN_COLUMNS, first_rows, misspelled

_MORE_NAMES: dict[str, tuple[str, ...]] = {
    "audio": ("filename", "file_name", "filepath", "recording", "clip"),
    "text": ("label", "words", "utterance", "prompt", "normalized_text", "raw_text", "content", "reference"),
    "speaker": ("speaker_name", "user", "user_id", "reader", "subject", "voice", "talker", "participant", "who"),
    "split": ("part", "set", "subset", "partition"),
}
"""Column names that are taken for a field only here: the commands say what they took for what."""
_SETS = SET_OF_SPLIT | {"training": "train", "val": "valid", "eval": "test", "evaluation": "test", "testing": "test"}
_READ, _LOOKED_AT = 100_000, 50


class GuessedColumns:
    """The columns of a table.

    Args:
        path: The table.
        given: Columns that need not be guessed, by field.

    Attributes:
        columns: The option `columns` of a source: column by field, for columns that are not known by their names.
        unused: Columns that are taken for nothing.
        splits: Set by value of the column of sets; empty if there is no such column.
        split_column: That column.
        encoding: The option `encoding` of a source: empty for one of the UTF encodings.

    Raises:
        CorpusError: If no column holds audio files that exist, or none holds text, or a given one does not exist; the
            message names the columns.
    """

    def __init__(self, path: Path, given: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._given = dict(given or {})
        self.encoding = "" if path.suffix.lower() in BINARY_TABLES else guess_encoding([path])
        self._rows = first_rows(path, _READ, self.encoding)
        if not self._rows:
            raise CorpusError(f"{path.name} has no rows")
        self._names = [str(name) for name in self._rows[0]]
        self._check_given()
        columns = {"audio": self._audio(), "text": self._text(), "speaker": self._named("speaker")} | self._given
        self.columns = {field: name for field, name in columns.items() if name and name != self._known(field)}
        self.split_column = self._named("split")
        used = {self.split_column, *columns.values(), *(name for names in KNOWN_COLUMNS.values() for name in names)}
        self.unused = [name for name in self._names if name not in used]
        values = sorted({str(row.get(self.split_column) or "") for row in self._rows}) if self.split_column else []
        sets = {value: set_of_name(value) for value in values}
        self.splits = {value: name for value, name in sets.items() if name} if all(sets.values()) else {}

    @property
    def own_split(self) -> bool:
        """Whether the reader understands the column of sets as it is."""
        return self.split_column == "split" and all(value == name for value, name in self.splits.items())

    def _check_given(self) -> None:
        for field, name in self._given.items():
            if field not in KNOWN_COLUMNS:
                raise CorpusError(f"there is no field {printable(field)!r} of a table{nearest(field, KNOWN_COLUMNS)}")
            if name not in self._names:
                raise CorpusError(
                    f"{self.path.name} has no column {printable(name)!r} for {field}{nearest(name, self._names)}"
                )

    def _known(self, field: str) -> str:
        return next((name for name in KNOWN_COLUMNS[field] if name in self._names), "")

    def _named(self, field: str) -> str:
        """The column that is given for a field, or has one of its names; empty if there is none."""
        if field in self._given:
            return self._given[field]
        more = [name for name in self._names if name.lower() in (*KNOWN_COLUMNS[field], *_MORE_NAMES[field])]
        return self._known(field) or (more[0] if more else "")

    def _audio(self) -> str:
        candidates = dict.fromkeys([self._named("audio"), *self._names])
        for name in candidates:
            if name and self._share_of_files(name) >= 0.5:
                return name
        usual = self._named("audio")  # recordings may be missing, or have a format that no other column is taken for
        if usual and any(self._exists(str(row.get(usual) or "")) for row in self._rows):
            return usual
        raise CorpusError(
            f"no column of {self.path.name} ({', '.join(self._names)}) names audio files that exist; paths count from "
            f"the folder of the table{self._looked_for(self._named('audio'))}"
        )

    def _looked_for(self, column: str) -> str:
        """Where the first recording of a column was looked for; empty if the column has no path."""
        value = next((str(row[column]) for row in self._rows if column and row.get(column)), "")
        where = os.path.normpath(self.path.parent.absolute() / value)
        return f": {printable(value)}, in the column {column}, would be {printable(where)}" if value else ""

    def _share_of_files(self, name: str) -> float:
        """Share of the first values of a column that are audio, or name audio files or URLs."""
        values = [row.get(name) for row in islice(self._rows, _LOOKED_AT)]
        return sum(isinstance(value, Cell) or self._is_audio(str(value or "")) for value in values) / len(values)

    def _is_audio(self, value: str) -> bool:
        return "://" in value or (Path(value).suffix.lower() in RECORDING_SUFFIXES and self._exists(value))

    def _exists(self, value: str) -> bool:
        """Whether a value is the path of a file as the reader understands it."""
        return bool(value) and is_file(named_file(self.path.parent, value))

    def _text(self) -> str:
        if name := self._named("text"):
            return name
        known = (*KNOWN_COLUMNS["text"], *_MORE_NAMES["text"])
        raise CorpusError(
            f"{self.path.name} has the columns {', '.join(self._names)}, and none has a name for transcripts "
            f"({', '.join(known)}): rename the one with the transcripts, or name it in "
            f"`starling init --column text=NAME`{misspelled(self._names, known)}"
        )


def set_of_name(name: str) -> str:
    """The set that a folder, a file or a value of a table stands for, such as `train` for `train-clean-5`.

    Returns:
        `train`, `valid` or `test`; empty if the name says nothing.
    """
    parts: Iterable[str] = name.lower().replace("_", "-").replace(".", "-").split("-")
    return next((_SETS[part] for part in parts if part in _SETS), "")
