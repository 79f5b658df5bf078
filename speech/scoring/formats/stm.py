"""NIST's stm format: `file channel speaker start end [<label,label>] text`, a segment per line, times in seconds.

    ;; LABEL "sw" "Switchboard" "from Switchboard"
    sw_4390 B sw_4390_B 11.34 15.02 <O,sw,M,sw-M> { i am / i'm } fine (%hesitation)
    sw_4390 B sw_4390_B 15.02 18.90 <O,sw,M,sw-M> IGNORE_TIME_SEGMENT_IN_SCORING

The text `IGNORE_TIME_SEGMENT_IN_SCORING` excludes a stretch, with or without its underscores. A comment such as
`;; LABEL "sw" "Switchboard" "from Switchboard"` defines a label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from speech.scoring.formats.base import (
    Purpose,
    TimedSegment,
    TranscriptError,
    TranscriptFile,
    TranscriptFormat,
    number,
    without_comments,
)

_IGNORED = re.compile(r"IGNORE_TIME_SEGMENT_IN_SCORING|IGNORETIMESEGMENTINSCORING", re.IGNORECASE)
_LABEL = re.compile(r';;\s*LABEL\s+"(?P<id>[^"]*)"\s+"(?P<title>[^"]*)"', re.IGNORECASE)
_SUBSETS = re.compile(r"<(?P<labels>[^<>]*)>(?: (?P<text>.*))?")


def read_stm(lines: Iterable[str], source: str, _: Purpose) -> TranscriptFile:
    """Reads the segments of an stm file, in the order of the file."""
    labels: dict[str, str] = {}
    segments = []
    for line, content in without_comments(lines, comment=""):
        if content.startswith(";;"):
            if match := _LABEL.match(content):
                labels[match["id"].lower()] = match["title"].strip() or match["id"]
        else:
            segments.append(_segment(content, line, f"{source}, line {line}"))
    return TranscriptFile(segments=segments, labels=labels)


def _segment(content: str, line: int, where: str) -> TimedSegment:
    fields = content.split(maxsplit=5)
    if len(fields) < 5:
        raise TranscriptError(f"{where}: {len(fields)} fields; write: file channel speaker start end <labels> text")
    start, end = number(fields[3], "start", where), number(fields[4], "end", where)
    if end < start:
        raise TranscriptError(f"{where}: the segment ends at {end:g} s, before it starts at {start:g} s")
    text = " ".join(fields[5].split()) if len(fields) > 5 else ""
    labels: tuple[str, ...] = ()
    if match := _SUBSETS.fullmatch(text):
        labels = tuple(name for part in match["labels"].lower().split(",") if (name := part.strip()))
        text = match["text"] or ""
    return TimedSegment(fields[0], fields[1], fields[2], start, end, text, line, labels, bool(_IGNORED.search(text)))


STM = TranscriptFormat("stm", (".stm",), "segments", read_stm, tags=True)
