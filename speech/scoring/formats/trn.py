"""NIST's trn format: one utterance per line, its words followed by its id in parentheses.

    the cat sat on the mat (speaker1-utterance7)

Use such files with sclite: `sclite -r ref.trn trn -h hyp.trn trn -i rm`. Parentheses, white space and "%" in an id,
which the format cannot represent, are percent-encoded in the file ("take 1" is `take%201`) and decoded when read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from unicodedata import normalize
from urllib.parse import quote, unquote

from speech.scoring.formats.base import (
    Purpose,
    TranscriptEntry,
    TranscriptError,
    TranscriptFile,
    TranscriptFormat,
    read_lines,
    unique_entries,
    without_comments,
)

_LINE = re.compile(r"(?P<text>.*?)\(\s*(?P<id>[^()\s]+)\s*\)\s*")
_NOT_IN_IDS = re.compile(r"[()%\s]")


def parse_trn(lines: Iterable[str], source: str = "trn") -> Iterator[tuple[str, str]]:
    """Yields (id, text) of each line; skips empty lines and comments (";;").

    Args:
        lines: Lines of a transcript file.
        source: Name of the file in error messages.

    Raises:
        TranscriptError: A line has no id at its end, or an id occurs twice.
    """
    return ((entry.id, entry.text) for entry in _entries(lines, source))


def _entries(lines: Iterable[str], source: str) -> Iterator[TranscriptEntry]:
    return unique_entries((_entry(number, line, source) for number, line in without_comments(lines)), source)


def _entry(number: int, line: str, source: str) -> TranscriptEntry:
    match = _LINE.fullmatch(line)
    if match is None:
        raise TranscriptError(
            f"{source}, line {number}: no utterance id in parentheses at the end: {line[:80]!r}; write: words (id)"
        )
    id_ = normalize("NFC", unquote(match["id"]))
    return TranscriptEntry(id_, " ".join(match["text"].split()), number)


def read_trn(path: Path | str) -> dict[str, str]:
    """Reads a transcript file (UTF-8) into {id: text}, in the order of the file.

    Raises:
        TranscriptError: The file is not UTF-8, a line has no id at its end, or an id occurs twice.
    """
    return dict(parse_trn(read_lines(Path(path)), str(path)))


def _read(lines: Iterable[str], source: str, _: Purpose) -> TranscriptFile:
    return TranscriptFile(list(_entries(lines, source)))


TRN = TranscriptFormat("trn", (".trn",), "utterances", _read, tags=True)


def format_trn(texts: Mapping[str, str]) -> str:
    """Writes {id: text} as the lines of a transcript file.

    Raises:
        TranscriptError: An id is empty.
    """
    lines = []
    for id_, text in texts.items():
        if not id_:
            raise TranscriptError(f"the utterance with the text {text[:60]!r} has an empty id: give it one")
        words = " ".join(text.split())
        # A line that starts with ";;" is a comment, and a file's first letter may be a byte order mark, which readers
        # drop; a leading space prevents both.
        margin = " " if words.startswith((";;", "\ufeff")) else ""
        name = _NOT_IN_IDS.sub(lambda match: quote(match[0], safe=""), id_)
        lines.append(f"{margin}{words} ({name})\n" if words else f"({name})\n")
    return "".join(lines)


def write_trn(path: Path | str, texts: Mapping[str, str]) -> None:
    """Writes {id: text} to a transcript file (UTF-8).

    Raises:
        TranscriptError: An id is empty; no file is written then.
    """
    content = format_trn(texts)
    Path(path).write_text(content, encoding="utf-8", newline="\n")
