"""Kaldi's text format: `utterance-id word word …`, one utterance per line.

    ann-1 the cat sat on the mat
    ann-2

Nothing was said in the second one.
"""

from __future__ import annotations

from collections.abc import Iterable

from speech.scoring.formats.base import (
    Purpose,
    TranscriptEntry,
    TranscriptFile,
    TranscriptFormat,
    unique_entries,
    without_comments,
)


def read_kaldi(lines: Iterable[str], source: str, _: Purpose) -> TranscriptFile:
    """Reads the lines of a text file."""
    entries = []
    for line, content in without_comments(lines, comment=""):
        id_, *words = content.split()
        entries.append(TranscriptEntry(id_, " ".join(words), line))
    return TranscriptFile(list(unique_entries(entries, source)))


KALDI = TranscriptFormat("kaldi", (".txt", ".text", "text"), "utterances", read_kaldi)
