"""NIST's ctm format, `file channel start duration word [confidence [type [speaker]]]`, times in seconds.

    sw2001 A 11.34 0.20 yes 0.97
    sw2001 A 11.60 0.08 uh 0.62 lex spk-3
    sw2001 A * * <ALT_BEGIN>
    sw2001 A 12.00 0.34 i'm
    sw2001 A * * <ALT>
    sw2001 A 12.00 0.13 i
    sw2001 A 12.13 0.21 am
    sw2001 A * * <ALT_END>

Several words on a line share its time equally, as NIST's csrfilt takes them. Alternatives are lines with `*` instead of
times: `<ALT_BEGIN>`, words, `<ALT>`, words, `<ALT_END>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite

from speech.scoring.formats.base import (
    Purpose,
    TimedWord,
    TranscriptError,
    TranscriptFile,
    TranscriptFormat,
    number,
    without_comments,
)

BEGIN, NEXT, END = "<ALT_BEGIN>", "<ALT>", "<ALT_END>"


def read_ctm(lines: Iterable[str], source: str, _: Purpose) -> TranscriptFile:
    """Reads the words of a ctm file, in the order of the file."""
    return TranscriptFile(words=list(_units(lines, source)))


def _units(lines: Iterable[str], source: str) -> Iterator[TimedWord]:
    choice: _Choice | None = None
    for line, content in without_comments(lines):
        where = f"{source}, line {line}"
        fields = content.split()
        if len(fields) < 5:
            raise TranscriptError(f"{where}: {len(fields)} fields; write: file channel start duration word")
        tag = fields[4].upper() if fields[2] == "*" else ""
        if tag == BEGIN and choice is None:
            choice = _Choice(line)
        elif tag == NEXT and choice:
            choice.sets.append([])
        elif tag == END and choice:
            yield choice.unit(where)
            choice = None
        elif tag:
            raise TranscriptError(f"{where}: {fields[4]} is out of place: order is {BEGIN}, {NEXT}, {END}")
        else:
            words = _words(fields, line, where)
            if choice:
                choice.sets[-1] += words
            else:
                yield from words
    if choice:
        raise TranscriptError(f"{source}, line {choice.line}: {BEGIN} without {END}: close the alternatives")


def _words(fields: list[str], line: int, where: str) -> list[TimedWord]:
    """The words of a line, which end where the confidence is."""
    start, duration = number(fields[2], "start", where), number(fields[3], "duration", where)
    end = next((place for place in range(5, len(fields)) if _is_confidence(fields[place])), len(fields))
    share = duration / (end - 4)
    return [
        TimedWord(fields[0], fields[1], start + place * share, share, text, line)
        for place, text in enumerate(fields[4:end])
    ]


def _is_confidence(text: str) -> bool:
    try:
        return text.upper() == "NA" or isfinite(float(text))
    except ValueError:
        return False


@dataclass
class _Choice:
    """Alternatives that are being read."""

    line: int
    sets: list[list[TimedWord]] = field(default_factory=lambda: [[]])

    def unit(self, where: str) -> TimedWord:
        """The alternatives as one text, at the time of the word whose middle is the latest."""
        words = [word for words in self.sets for word in words]
        if not words:
            raise TranscriptError(f"{where}: there is no word in the alternatives: remove them")
        last = max(words, key=lambda word: word.start + word.duration / 2)
        text = " / ".join(" ".join(word.text for word in words) or "@" for words in self.sets)
        return TimedWord(last.file, last.channel, last.start, last.duration, f"{{ {text} }}", self.line)


CTM = TranscriptFormat("ctm", (".ctm",), "words", read_ctm, tags=True)
