"""Lexicons: how words are pronounced.

    built = build_lexicon(FileLexiconConfig(path="cmudict.dict", stress="drop"), Counter(words))
    built.lexicon["starling"][0].phones          # ("S", "T", "AA", "R", "L", "IH", "NG")
    built.lexicon.write(Path("lexicon.txt"))
    built.record()                               # words, phones, coverage, quarantined lines

A new source is one file with its configuration beside `graphemes.py`, and one line in `LEXICONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from configurable.choices import OneOf
from speech.lexicon.base import (
    BadLine,
    Built,
    Coverage,
    Lexicon,
    LexiconConfig,
    LexiconError,
    LexiconSource,
    Pronunciation,
)
from speech.lexicon.espeak import Espeak, EspeakConfig
from speech.lexicon.file import FileLexicon, FileLexiconConfig
from speech.lexicon.formats import read_lexicon
from speech.lexicon.graphemes import Graphemes, GraphemesConfig

__all__ = [
    "LEXICONS",
    "BadLine",
    "Built",
    "Coverage",
    "Espeak",
    "EspeakConfig",
    "FileLexicon",
    "FileLexiconConfig",
    "Graphemes",
    "GraphemesConfig",
    "Lexicon",
    "LexiconChoice",
    "LexiconConfig",
    "LexiconError",
    "LexiconSource",
    "Pronunciation",
    "build_lexicon",
    "read_lexicon",
]

LEXICONS: dict[str, type[LexiconConfig]] = {
    "file": FileLexiconConfig,
    "espeak": EspeakConfig,
    "graphemes": GraphemesConfig,
}
LexiconChoice = Annotated[LexiconConfig, OneOf(LEXICONS, "file")]
"""A field that takes the configuration of any source; a mapping without a kind names a file."""


def build_lexicon(cfg: LexiconConfig, counts: Mapping[str, int]) -> Built:
    """Builds a lexicon for some words.

    Args:
        cfg: Configuration of the source.
        counts: The words, and how often each occurs.

    Raises:
        LexiconError: The source cannot be read.
    """
    built = cfg.build().build(counts)
    built.notes += built.coverage.warnings()
    return built
