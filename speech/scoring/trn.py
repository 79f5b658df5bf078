"""NIST's transcript format: one utterance a line, its words and then its id in parentheses.

    the cat sat on the mat (speaker1-utterance7)

Such files go to sclite: `sclite -r ref.trn trn -h hyp.trn trn -i rm`. Parentheses, white space and "%" in an id, which
the format cannot hold, are percent-encoded in the file ("take 1" is `take%201`) and decoded again when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

_LINE = re.compile(r"(?P<text>.*?)\(\s*(?P<id>[^()\s]+)\s*\)\s*")
_NOT_IN_IDS = re.compile(r"[()%\s]")


class TrnError(ValueError):
    """A line that is no transcript; the message names the line."""


def parse_trn(lines: Iterable[str], source: str = "trn") -> Iterator[tuple[str, str]]:
    """Yields (id, text) of each line; empty lines and comments (";;") are passed over.

    Args:
        lines: Lines of a transcript file.
        source: What the messages call it.

    Raises:
        TrnError: A line has no id at its end, or an id comes twice.
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
        TrnError: The file is not UTF-8, a line has no id at its end, or an id comes twice.
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
        # A line that begins with ";;" is a comment, one that begins with a space is not.
        margin = " " if words.startswith(";;") else ""
        name = _NOT_IN_IDS.sub(lambda match: quote(match[0], safe=""), id_)
        lines.append(f"{margin}{words} ({name})\n" if words else f"({name})\n")
    return "".join(lines)


def write_trn(path: Path | str, texts: Mapping[str, str]) -> None:
    """Writes {id: text} to a transcript file (UTF-8).

    Raises:
        TrnError: An id is empty; then no file is made.
    """
    content = format_trn(texts)
    Path(path).write_text(content, encoding="utf-8", newline="\n")
