"""Transcript formats: NIST's trn, ctm and stm, Kaldi's text, and JSON lines, behind one registry.

A new format is a module with a `TranscriptFormat`, and a line in `FORMATS`.
"""

from __future__ import annotations

from pathlib import Path

from speech.scoring.formats.base import (
    Purpose,
    TimedSegment,
    TimedWord,
    TranscriptEntry,
    TranscriptError,
    TranscriptFile,
    TranscriptFormat,
    read_lines,
)
from speech.scoring.formats.ctm import CTM
from speech.scoring.formats.jsonl import JSONL
from speech.scoring.formats.kaldi import KALDI
from speech.scoring.formats.stm import STM
from speech.scoring.formats.trn import TRN

FORMATS: dict[str, TranscriptFormat] = {format_.name: format_ for format_ in (TRN, KALDI, JSONL, CTM, STM)}
"""Formats by name."""

__all__ = [
    "FORMATS",
    "Purpose",
    "TimedSegment",
    "TimedWord",
    "TranscriptEntry",
    "TranscriptError",
    "TranscriptFile",
    "TranscriptFormat",
    "find_format",
    "read_transcript",
]


def find_format(path: Path, name: str = "") -> TranscriptFormat:
    """The format of a file: the one named, else that of its name's ending.

    Raises:
        TranscriptError: There is no such format.
    """
    if name:
        if name not in FORMATS:
            raise TranscriptError(f"{name!r} is not a format: formats are {', '.join(FORMATS)}")
        return FORMATS[name]
    for format_ in FORMATS.values():
        if path.suffix.lower() in format_.suffixes or path.name in format_.suffixes:
            return format_
    raise TranscriptError(f"{path}: the name does not tell the format: give --format, one of {', '.join(FORMATS)}")


def read_transcript(path: Path, purpose: Purpose, format_name: str = "", may_be_empty: bool = False) -> TranscriptFile:
    """Reads a transcript.

    Args:
        path: A text file in UTF-8.
        purpose: Whether it is the reference or a hypothesis.
        format_name: Its format; by default, the ending of its name tells.
        may_be_empty: Accept a file with nothing in it.

    Raises:
        TranscriptError: The file cannot be read as its format, or is empty.
    """
    transcript = find_format(path, format_name).read(read_lines(path), str(path), purpose)
    if not len(transcript) and not may_be_empty:
        remedy = "; if nothing was recognized, use --missing delete" if purpose == "hyp" else ""
        raise TranscriptError(f"{path}: there is nothing in it: is it the right file?{remedy}")
    return transcript
