"""LJSpeech's layout: metadata.csv, whose lines are `ID|TEXT|NORMALIZED TEXT`, without a header, beside wavs/ID.wav.

Source: Ito and Johnson 2017, "The LJ Speech Dataset"; also that of M-AILABS' books and of many corpora for synthesis.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from storage.corpora.base import (
    NOT_UTF8,
    RECORDING_SUFFIXES,
    WESTERN,
    CorpusError,
    CorpusReader,
    Utterance,
    is_file,
    read_lines,
)

_TABLE = "metadata.csv"
_FOLDERS = ("wavs", "wav", "")


class LJSpeechReader(CorpusReader):
    """Reads the folder, or its table.

    The transcript is the normalized text, in which numbers are spelled out, or the text where that is missing or
    blank. The speaker is the folder's name. Cells are not quoted.
    """

    LAYOUT = "LJSpeech: `metadata.csv` without a header: ID, text, normalized text between vertical bars; `wavs/ID.wav`"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "metadata.csv": "LJ001-0001|At 6 pm,|At six pm,\nLJ001-0002|good night|good night\n",
        "wavs/LJ001-0001.wav": "",
        "wavs/LJ001-0002.wav": "",
    }

    OPTIONS = frozenset({"encoding"})

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether the table's first line names a recording in `wavs`, `wav`, or the folder itself."""
        table = root / _TABLE if root.is_dir() else root
        if table.suffix not in (".csv", ".txt") or not table.is_file():
            return False
        first = next(read_lines(table), (1, ""))[1]
        if first is None:  # not UTF-8: the name of the recording, which is before the text, can be read nevertheless
            _, first = next(read_lines(table, WESTERN))
        name, bar, _ = (first or "").partition("|")
        return bool(bar and _recording(table.parent, name))

    def _utterances(self) -> Iterator[Utterance]:
        table, used = self._table(), set[Path]()
        if not table.is_file():
            raise CorpusError(f"{table} does not exist: name the folder with {_TABLE} and {_FOLDERS[0]}")
        for number, line in read_lines(table, self.encoding):
            if line == "":
                continue
            cells = [] if line is None else [cell.strip() for cell in line.split("|")]
            if len(cells) not in (2, 3) or not cells[0]:
                wrong = NOT_UTF8 if line is None else f"{len(cells)} cells instead of ID|TEXT or ID|TEXT|TEXT"
                self._problem(f"{table.name}:{number}", "bad-line", f"line {number} of {table}: {wrong}")
                continue
            audio = _recording(table.parent, cells[0])
            text = cells[-1] or cells[1]
            if audio is None:
                self._problem(cells[0], "missing-audio", f"line {number} of {table}: no recording has this name")
                continue
            used.add(audio)
            if utterance := self._make(audio.stem, audio, text, table.parent.name):
                yield utterance
        for path in self._audio():
            if path not in used:
                self._problem(path.stem, "missing-transcript", f"{table} has no line for {path}")

    def _table(self) -> Path:
        return self.root / _TABLE if self.root.is_dir() else self.root

    def _audio(self) -> Iterator[Path]:
        for folder in _FOLDERS:
            paths = (self._table().parent / folder).glob("*")
            yield from sorted(path for path in paths if path.suffix.lower() in RECORDING_SUFFIXES)

    @override
    def scanned(self) -> list[Path]:
        return [self._table().parent / folder for folder in _FOLDERS if folder]

    def files(self) -> Iterator[Path]:
        """Yield the table and the recordings."""
        yield self._table()
        yield from self._audio()


def _recording(folder: Path, name: str) -> Path | None:
    """The recording that the first cell of a line names, with or without folder and suffix; None if there is none."""
    name = name.strip()
    if not name or name.startswith("/") or ".." in Path(name).parts:
        return None
    places = (folder / own / f"{name}{suffix}" for own in _FOLDERS for suffix in ("", ".wav", ".flac", ".mp3", ".ogg"))
    return next((path for path in places if is_file(path)), None)
