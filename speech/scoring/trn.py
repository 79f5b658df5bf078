"""NIST's trn format: one utterance per line, its words followed by its id in parentheses.

    the cat sat on the mat (speaker1-utterance7)

Use such files with sclite: `sclite -r ref.trn trn -h hyp.trn trn -i rm`. Parentheses, white space and "%" in an id,
which the format cannot represent, are percent-encoded in the file ("take 1" is `take%201`) and decoded when read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

_LINE = re.compile(r"(?P<text>.*?)\(\s*(?P<id>[^()\s]+)\s*\)\s*")
_NOT_IN_IDS = re.compile(r"[()%\s]")


class TrnError(ValueError):
    """An invalid line; the message names it."""


def parse_trn(lines: Iterable[str], source: str = "trn") -> Iterator[tuple[str, str]]:
    """Yields (id, text) of each line; skips empty lines and comments (";;").

    Args:
        lines: Lines of a transcript file.
        source: Name of the file in error messages.

    Raises:
        TrnError: A line has no id at its end, or an id occurs twice.
    """
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(";;"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise TrnError(f"{source}, line {number}: no utterance id in parentheses at the end: {line.strip()[:80]!r}")
        id_ = unquote(match["id"])
        if id_ in seen:
            raise TrnError(f"{source}, line {number}: utterance {id_!r} was already in line {seen[id_]}")
        seen[id_] = number
        yield id_, " ".join(match["text"].split())


def read_trn(path: Path | str) -> dict[str, str]:
    """Reads a transcript file (UTF-8) into {id: text}, in the order of the file.

    Raises:
        TrnError: The file is not UTF-8, a line has no id at its end, or an id occurs twice.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            return dict(parse_trn(file, str(path)))
    except UnicodeDecodeError as error:
        raise TrnError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def format_trn(texts: Mapping[str, str]) -> str:
    """Writes {id: text} as the lines of a transcript file.

    Raises:
        TrnError: An id is empty.
    """
    lines = []
    for id_, text in texts.items():
        if not id_:
            raise TrnError(f"the utterance with the text {text[:60]!r} has an empty id: give it one")
        words = " ".join(text.split())
        # A line that starts with ";;" is a comment; a leading space prevents that.
        margin = " " if words.startswith(";;") else ""
        name = _NOT_IN_IDS.sub(lambda match: quote(match[0], safe=""), id_)
        lines.append(f"{margin}{words} ({name})\n" if words else f"({name})\n")
    return "".join(lines)


def write_trn(path: Path | str, texts: Mapping[str, str]) -> None:
    """Writes {id: text} to a transcript file (UTF-8).

    Raises:
        TrnError: An id is empty; no file is written then.
    """
    content = format_trn(texts)
    Path(path).write_text(content, encoding="utf-8", newline="\n")
