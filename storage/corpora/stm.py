"""Segment tables in NIST's stm format: a line is `FILE CHANNEL SPEAKER START END <LABELS> TEXT`.

    AnnLee_2010 1 AnnLee 0.5 2.0 <o,f0,female> good morning <unk>
    AnnLee_2010 1 inter_segment_gap 2.0 2.6 <o,,unknown> ignore_time_segment_in_scoring

The second one is a stretch that the corpus excludes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from storage.corpora.base import checked_times, read_lines

NOT_SCORED = "ignore_time_segment_in_scoring"
"""The text of a segment that its corpus excludes from scoring."""


class StmSegment(NamedTuple):
    """A line of the table.

    Attributes:
        place: File and line, for messages.
        file: Name of the recording, without a suffix.
        channel: As written: `A`, `B`, `1`, ….
        speaker: Name of the speaker.
        start: Seconds from the start of the recording.
        end: Seconds.
        text: The transcript, with the marks of its corpus.
    """

    place: str
    file: str
    channel: str
    speaker: str
    start: float
    end: float
    text: str


class StmError(ValueError):
    """A line is no segment; `place` names it."""

    def __init__(self, place: str, text: str) -> None:
        super().__init__(text)
        self.place = place


def read_stm(path: Path) -> Iterator[StmSegment | StmError]:
    """Yield the segments of a table, and an error for each line that is none; comments are skipped."""
    try:
        yield from _segments(path)
    except OSError as error:
        yield StmError(path.name, f"{path} cannot be read ({error.strerror or error})")


def _segments(path: Path) -> Iterator[StmSegment | StmError]:
    for number, line in read_lines(path):
        if line is not None and (not line.strip() or line.startswith(";;")):
            continue
        place = f"{path.name}:{number}"
        fields = (line or "").split(maxsplit=6)
        try:
            if line is None or len(fields) < 5:
                raise ValueError("not UTF-8" if line is None else "too few fields")
            start, end = checked_times(float(fields[3]), float(fields[4]))
        except ValueError as error:
            yield StmError(place, f"line {number} of {path}: {error}")
            continue
        assert end is not None
        labelled = len(fields) > 5 and fields[5].startswith("<")
        text = " ".join(fields[6 if labelled else 5 :])
        yield StmSegment(place, fields[0], fields[1], fields[2], start, end, text)
