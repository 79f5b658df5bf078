"""The words of a run's transcripts, and of its language model."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from speech.decoding import DecodeConfig
from speech.lm import LmError
from speech.lm.kenlm import arpa_words, read_words
from storage.objects import ObjectStore
from storage.stages import StageOutput
from tasks.dataset.manifest import MANIFEST
from tasks.dataset.tables import iter_table


def transcript_words(source: ObjectStore | StageOutput) -> dict[str, Counter[str]]:
    """For each set, how often each word comes in its normalized transcripts.

    Args:
        source: Output of the stage prepare.
    """
    counters: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in iter_table(source, MANIFEST, Path(folder), ["set", "text"]):
            counters.setdefault(str(row["set"]), Counter()).update(str(row["text"]).split())
    return dict(sorted(counters.items()))


def set_transcripts(source: ObjectStore | StageOutput, wanted: Callable[[str], bool]) -> Iterator[str]:
    """Normalized transcripts of some sets, as they are before sharding.

    Args:
        source: Output of the stage prepare.
        wanted: Whether a set's transcripts are.
    """
    with tempfile.TemporaryDirectory() as folder:
        for row in iter_table(source, MANIFEST, Path(folder), ["set", "text"]):
            if wanted(str(row["set"])):
                yield str(row["text"])


def decoder_words(cfg: DecodeConfig) -> list[str]:
    """The words that a decoder's list or language model has; none if it has neither, or cannot be listed."""
    files: Mapping[str, Any] = cfg.files() if cfg.kind == "words" else {}
    if "words" in files:
        return read_words(files["words"])
    try:
        return arpa_words(files["lm"]) if "lm" in files else []
    except LmError:
        return []
