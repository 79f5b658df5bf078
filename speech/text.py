"""Text normalization: what a transcript looks like before it is cut into tokens or scored.

A transcript arrives as somebody typed it ("It's 5 o’clock — 1,200 people!"); a recognizer with a small alphabet is
trained on, and scored against, what was *said* ("it's five o'clock one thousand two hundred people"). The same
normalizer must serve training, references and hypotheses, because normalization alone moves a word error rate by one to
two per cent absolute.

    normalizer = TextNormalizer(NormalizerConfig())
    normalizer("Dr. Who's 2nd!")   # "dr who's second"

Every normalizer is idempotent. Numbers are read the short American way ("one hundred one"); years, dates and
abbreviations are not interpreted, since no rule without context gets them right.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from pydantic import BaseModel, ConfigDict

from speech.english import LARGEST_NUMBER, number_words, ordinal_words, spell_numbers
from speech.scripts import FAMILIES, LanguageError, change_case, compose, family_of, number_speller, primary

__all__ = [
    "LARGEST_NUMBER",
    "LanguageError",
    "NormalizerConfig",
    "TextError",
    "TextNormalizer",
    "number_words",
    "ordinal_words",
]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
APOSTROPHE = "'"

_APOSTROPHES = "’ʼ＇`´′‛ʹ"
_OPEN_QUOTES = re.compile(r"‘(.*?)’(?!\w)")
_SYMBOLS = {"&": " and ", "%": " percent ", "@": " at ", "+": " plus ", "=": " equals ", "°": " degrees "}
_FRACTIONS = {ord("½"): " one half ", ord("¼"): " one quarter ", ord("¾"): " three quarters "}
# Letters that Unicode does not decompose into a base letter and an accent.
_LATIN = {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"}
_LATIN |= {small.upper(): large.upper() for small, large in _LATIN.items() if small not in "ßı"}

_PLAIN = re.compile(r"[a-zA-Z ]*(?:(?<=[a-zA-Z])'(?=[a-zA-Z])[a-zA-Z ]*)*")


class TextError(ValueError):
    """A transcript that cannot be used.

    Attributes:
        reason: "empty-text" when nothing is left after normalization, "outside-alphabet" when characters remain
            that the alphabet lacks.
        characters: The offending characters, sorted, each once ("" for an empty text).
    """

    def __init__(self, reason: Literal["empty-text", "outside-alphabet"], message: str, characters: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.characters = characters


class NormalizerConfig(BaseModel):
    """How transcripts are normalized."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    kind: Literal[
        "english",
        "basic",
        "none",
        "auto",
        "latin",
        "cyrillic",
        "greek",
        "arabic",
        "persian",
        "hebrew",
        "indic",
        "thai",
        "korean",
        "cjk",
    ] = "english"
    """`english` spells numbers and symbols, drops accents and punctuation; `basic` (any language) drops punctuation
    only; `none` leaves the text as it is except for white space and Unicode composition (its case too); the others
    are families of writing systems (speech/scripts.py); `auto` goes by each utterance's language."""
    case: Literal["upper", "lower", "keep"] = "lower"
    """Letter case of the result; without effect for kind `none`."""
    numbers: Literal["auto", "words", "keep"] = "auto"
    """Digits as words: `auto` in English only; `words` in other languages too, by the package num2words."""
    punctuation: Literal["drop", "keep"] = "drop"
    """Whether punctuation stays; `english` and `basic` always drop it."""
    fold: bool = False
    """One spelling where custom knows several: Russian ё as е, Arabic alefs and Greek vowels without their marks."""
    alphabet: str | None = None
    """The characters that may remain; a space is always allowed. None: the letters a to z and the apostrophe for
    `english` (in the chosen case), everything for the other kinds."""


def _fold_typography(text: str) -> str:
    """Makes every kind of apostrophe plain and drops typographic quotation marks that come as a pair."""
    text = _OPEN_QUOTES.sub(r" \1 ", text)
    return text.translate(_TYPOGRAPHY)


_TYPOGRAPHY = {ord(mark): APOSTROPHE for mark in _APOSTROPHES + "‘"}
_ENGLISH = {ord(sign): words for sign, words in {**_LATIN, **_SYMBOLS}.items()}


def _drop_punctuation(text: str) -> str:
    """Keeps letters, digits, marks and apostrophes; invisible format characters vanish, the rest become spaces."""
    return "".join(_kept(character) for character in text)


def _kept(character: str) -> str:
    if character == APOSTROPHE or character.isalnum():
        return character
    category = unicodedata.category(character)
    if category[0] in "LNM":
        return character
    return "" if category == "Cf" else " "


def _clean_word(word: str) -> str:
    """Takes quotation marks off one word; an apostrophe at one end only ('tis, dogs') belongs to the word."""
    while len(word) > 1 and word[0] == word[-1] == APOSTROPHE:
        word = word[1:-1]
    return "" if word.strip(APOSTROPHE) == "" else word


def _collapse(text: str) -> str:
    # Two apostrophes in a row are a quotation mark, never a letter's elision.
    words = re.sub(r"''+", " ", text).split() if APOSTROPHE in text else text.split()
    return " ".join(filter(None, map(_clean_word, words)))


class TextNormalizer:
    """Normalizes transcripts as its configuration says; calling it also checks the result."""

    def __init__(self, cfg: NormalizerConfig | None = None) -> None:
        self.cfg = cfg or NormalizerConfig()
        self._alphabet = self._allowed()

    def __call__(self, text: str, language: str = "") -> str:
        """Returns the normalized text.

        Args:
            text: A transcript.
            language: Its BCP 47 tag; decides the rules for kind `auto`, the case and the words of numbers.

        Raises:
            TextError: Nothing is left (reason "empty-text"), or a character lies outside the alphabet
                ("outside-alphabet").
            LanguageError: Numbers are wanted as words of a language that is not supported.
        """
        result = self.normalize(text, language)
        if not result:
            raise TextError("empty-text", f"nothing is left of the text {_shorten(text)} after normalization")
        if self._alphabet is not None and not self._alphabet.issuperset(result):
            outside = "".join(sorted(set(result) - self._alphabet))
            names = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in outside)
            raise TextError(
                "outside-alphabet",
                f"the text {_shorten(text)} holds {names}, outside the alphabet: "
                "add them to `alphabet`, or correct the text",
                outside,
            )
        return result

    def normalize(self, text: str, language: str = "") -> str:
        """Returns the normalized text without any check; the result may be empty (as a silent hypothesis is)."""
        kind = self._kind(language)
        if kind == "none":
            return " ".join(unicodedata.normalize("NFC", text).split())
        if kind == "english" and _PLAIN.fullmatch(text):
            return " ".join(change_case(text, self.cfg.case).split())
        # Case mapping and composition can undo each other for a few letters (İ, ŉ): go on until nothing changes.
        for _ in range(8):
            before, text = text, self._one_pass(text, kind, language)
            if text == before:
                break
        return text

    def _kind(self, language: str) -> str:
        if self.cfg.kind != "auto":
            return self.cfg.kind
        return "english" if primary(language) == "en" else family_of(language).name

    def _one_pass(self, text: str, kind: str, language: str) -> str:
        if kind in FAMILIES:
            return self._family_pass(text, kind, language)
        english = kind == "english"
        if english and not text.isascii():
            text = text.translate(_FRACTIONS)
        text = _fold_typography(text)
        text = unicodedata.normalize("NFKC", text)
        if english:
            text = spell_numbers(text).translate(_ENGLISH)
            if not text.isascii():
                text = _drop_accents(text)
        text = change_case(_collapse(_drop_punctuation(text)), self.cfg.case)
        return unicodedata.normalize("NFKC", text)

    def _family_pass(self, text: str, kind: str, language: str) -> str:
        family = FAMILIES[kind]
        if self.cfg.numbers == "words":
            text = spell_numbers(text) if primary(language) == "en" else number_speller(primary(language))(text)
        text = family.clean(_fold_typography(text), self.cfg.fold)
        if self.cfg.punctuation == "drop":
            text = _collapse(_drop_punctuation(text))
        text = family.clean(" ".join(text.split()), self.cfg.fold)
        return compose(change_case(text, self.cfg.case, language))

    def _allowed(self) -> frozenset[str] | None:
        if self.cfg.alphabet is not None:
            return frozenset(self.cfg.alphabet) | {" "}
        if self.cfg.kind != "english":
            return None
        letters = {"lower": LETTERS, "upper": LETTERS.upper(), "keep": LETTERS + LETTERS.upper()}[self.cfg.case]
        return frozenset(letters + APOSTROPHE + " ")


def _drop_accents(text: str) -> str:
    # Only Latin letters lose their accents: elsewhere a mark can make another letter, which the alphabet check names.
    parts = unicodedata.normalize("NFD", text)
    kept: list[str] = []
    for character in parts:
        if unicodedata.combining(character) and kept and kept[-1].isascii():
            continue
        kept.append(character)
    return unicodedata.normalize("NFC", "".join(kept))


def _shorten(text: str, width: int = 60) -> str:
    return repr(text if len(text) <= width else text[: width - 1] + "…")
