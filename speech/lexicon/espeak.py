"""Pronunciations by eSpeak NG, for all of its languages. It is installed by the extra `espeak`, not by the core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from typing_extensions import override

from speech.lexicon.base import Built, Lexicon, LexiconConfig, LexiconError, LexiconSource, Pronunciation, covered
from speech.lexicon.stress import Stress, with_stress
from speech.synthesis.espeak import Engine, SynthesizerMissingError, VoiceError


class EspeakConfig(LexiconConfig):
    """Pronunciations by eSpeak NG, in IPA."""

    kind: Literal["espeak"] = "espeak"
    language: str = "en-us"
    """Language code of eSpeak NG, such as `de`, `fr`, `es-419`."""
    stress: Stress = "keep"
    """Stress marks: `keep` them, `merge` secondary with primary stress, or `drop` them."""

    @override
    def build(self) -> LexiconSource:
        return Espeak(self)


def pronounce(words: Iterable[str], language: str) -> dict[str, tuple[str, ...]]:
    """Returns eSpeak NG's phonemes of each word, with stress marks; words without phonemes are omitted.

    Args:
        words: Single words.
        language: Language code of eSpeak NG.

    Raises:
        SynthesizerMissingError: eSpeak NG is not installed.
        LexiconError: eSpeak NG does not have the language.
    """
    phonemes = {}
    with Engine() as engine:
        for word in words:
            try:
                phones = engine.phonemes(word, language)
            except VoiceError as error:
                raise LexiconError(f"lexicon.language: {error}") from error
            if phones:
                phonemes[word] = phones
    return phonemes


class Espeak(LexiconSource):
    """Pronounces every word with eSpeak NG."""

    cfg: EspeakConfig

    @override
    def build(self, counts: Mapping[str, int]) -> Built:
        try:
            phonemes = pronounce(counts, self.cfg.language)
        except SynthesizerMissingError as error:
            raise LexiconError(f"lexicon.kind espeak: {error}") from error
        entries = {
            word: [Pronunciation(tuple(with_stress(phone, self.cfg.stress) for phone in phones))]
            for word, phones in phonemes.items()
        }
        coverage, missing = covered(counts, entries, "espeak")
        for word in missing:
            coverage.add(word, counts[word], "unknown")
        return Built(Lexicon(entries), coverage)
