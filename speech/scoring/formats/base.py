"""What transcripts of all formats are read into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from unicodedata import normalize

Purpose = Literal["ref", "hyp"]
"""Whether a transcript is the reference or a hypothesis."""


class TranscriptError(ValueError):
    """A transcript that cannot be read; the message names file, line and remedy."""


@dataclass(frozen=True)
class TranscriptEntry:
    """The text of one utterance."""

    id: str
    text: str
    line: int
    """Line of the file, from 1."""
    speaker: str = ""
    domain: str = ""


@dataclass(frozen=True)
class TimedWord:
    """A word of a recording, or alternatives in braces."""

    file: str
    channel: str
    start: float
    """Seconds."""
    duration: float
    """Seconds."""
    text: str
    line: int


@dataclass(frozen=True)
class TimedSegment:
    """What is said in a stretch of a recording."""

    file: str
    channel: str
    speaker: str
    start: float
    """Seconds."""
    end: float
    """Seconds."""
    text: str
    line: int
    labels: tuple[str, ...] = ()
    """Subsets that the segment belongs to."""
    ignored: bool = False
    """Whether the stretch is excluded from scoring."""


@dataclass(frozen=True)
class TranscriptFile:
    """What a file holds: utterances, timed words, or timed segments."""

    utterances: list[TranscriptEntry] = field(default_factory=list)
    words: list[TimedWord] = field(default_factory=list)
    segments: list[TimedSegment] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    """Titles of the labels that the file defines, in order."""

    def __len__(self) -> int:
        return len(self.utterances) + len(self.words) + len(self.segments)

    def map_texts(self, change: Callable[[str, int], str]) -> TranscriptFile:
        """Replaces each text by what a function of it and its line gives."""
        return TranscriptFile(
            [replace(utterance, text=change(utterance.text, utterance.line)) for utterance in self.utterances],
            [replace(word, text=change(word.text, word.line)) for word in self.words],
            [
                segment if segment.ignored else replace(segment, text=change(segment.text, segment.line))
                for segment in self.segments
            ],
            self.labels,
        )


@dataclass(frozen=True)
class TranscriptFormat:
    """A file format.

    Args:
        name: Its name on the command line.
        suffixes: Endings of file names that have it by default.
        holds: What its files hold: texts of utterances, timed words, or timed segments.
        read: Reads lines; its other arguments are the file's name for messages, and its purpose.
        tags: Whether words may have tags behind semicolons, as in NIST's formats.
    """

    name: str
    suffixes: tuple[str, ...]
    holds: Literal["utterances", "words", "segments"]
    read: Callable[[Iterable[str], str, Purpose], TranscriptFile]
    tags: bool = False


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, in composed letters (NFC).

    Raises:
        TranscriptError: The file is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in file:
                yield normalize("NFC", line)
    except UnicodeDecodeError as error:
        remedy = "convert it, for example with `iconv -f latin1 -t utf-8`"
        raise TranscriptError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}; {remedy}") from error


def without_comments(lines: Iterable[str], comment: str = ";;") -> Iterator[tuple[int, str]]:
    """Numbers lines from 1, and leaves out blank ones and comments."""
    for number, line in enumerate(lines, 1):
        if line.strip() and not (comment and line.startswith(comment)):
            yield number, line.strip()


def unique_entries(entries: Iterable[TranscriptEntry], source: str) -> Iterator[TranscriptEntry]:
    """Passes entries on whose ids differ.

    Raises:
        TranscriptError: An id occurs twice.
    """
    seen: dict[str, int] = {}
    for entry in entries:
        if entry.id in seen:
            raise TranscriptError(
                f"{source}, line {entry.line}: utterance {entry.id!r} was already in line {seen[entry.id]}: keep one"
            )
        seen[entry.id] = entry.line
        yield entry


def number(text: str, what: str, where: str) -> float:
    """Reads seconds.

    Raises:
        TranscriptError: The text is not a number from 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise TranscriptError(f"{where}: {what} {text!r} must be a number of seconds, 0 or more")
    return value
