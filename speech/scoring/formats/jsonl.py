"""JSON lines: an object for each utterance, as in NeMo's manifests.

    {"id": "ann-1", "text": "the cat sat", "speaker": "ann", "domain": "read"}

| field | is |
|---|---|
| `id`, or `audio_filepath` | the utterance |
| `text`; of a hypothesis `pred_text` or `hyp`, of a reference `ref`, if they are there | the text |
| `speaker`, `domain` | optional |
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from unicodedata import normalize

from speech.scoring.formats.base import (
    Purpose,
    TranscriptEntry,
    TranscriptError,
    TranscriptFile,
    TranscriptFormat,
    unique_entries,
    without_comments,
)

_TEXTS: dict[Purpose, tuple[str, ...]] = {"ref": ("ref", "text"), "hyp": ("pred_text", "hyp", "text")}
_IDS = ("id", "audio_filepath")


def read_jsonl(lines: Iterable[str], source: str, purpose: Purpose) -> TranscriptFile:
    """Reads JSON objects, one per line."""
    entries = (_entry(content, line, f"{source}, line {line}", purpose) for line, content in without_comments(lines))
    return TranscriptFile(list(unique_entries(entries, source)))


def _entry(content: str, line: int, where: str, purpose: Purpose) -> TranscriptEntry:
    try:
        value = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TranscriptError(f"{where}: not a JSON object on one line ({error})") from error
    if not isinstance(value, dict):
        raise TranscriptError(f"{where}: not a JSON object: write {{'id': ..., 'text': ...}}")
    id_ = _text(value, _IDS, where)
    text = " ".join(_text(value, _TEXTS[purpose], where).split())
    speaker, domain = (normalize("NFC", str(value.get(name) or "")) for name in ("speaker", "domain"))
    return TranscriptEntry(id_, text, line, speaker, domain)


def _text(value: dict[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if isinstance(value.get(name), str):
            return normalize("NFC", value[name])  # JSON may escape what is composed
    raise TranscriptError(f"{where}: no text in {' or '.join(names)}; fields there: {', '.join(map(str, value))}")


JSONL = TranscriptFormat("jsonl", (".jsonl", ".json", ".ndjson"), "utterances", read_jsonl)
