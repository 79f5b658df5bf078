"""Text normalization of transcripts, before tokenization and scoring.

Transcripts are written text ("It's 5 o’clock — 1,200 people!"); a recognizer with a small alphabet is trained on, and
scored against, the *spoken* form ("it's five o'clock one thousand two hundred people"). Training, references and
hypotheses must use the same normalizer: normalization alone changes a word error rate by one to two per cent absolute.

    normalizer = TextNormalizer(NormalizerConfig())
    normalizer("Dr. Who's 2nd!")   # "dr who's second"

Every normalizer is idempotent. Numbers are read the short American way ("one hundred one"). Years, dates and
abbreviations are not interpreted: without context, no rule gets them right. Only "Mr" and "Mrs" are always the same:
English ones are written "mister" and "missus", as in LibriSpeech.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Literal

from configurable.configuration import Configuration
from speech.english import LARGEST_NUMBER, number_words, ordinal_words, plain_numbers, spell_numbers
from speech.number_words import number_speller
from speech.scripts import FAMILIES, LanguageError, change_case, compose, family_of, primary

__all__ = [
    "LARGEST_NUMBER",
    "LanguageError",
    "NormalizerConfig",
    "TextError",
    "TextNormalizer",
    "normalizer_of",
    "number_words",
    "ordinal_words",
]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
APOSTROPHE = "'"

_APOSTROPHES = "’ʼ＇`´′‛ʹ"
_OPEN_QUOTES = re.compile(r"‘((?:[^‘’]|’(?=\w))*)’(?!\w)")  # never looks past the next quotation
_SYMBOLS = {"&": " and ", "@": " at ", "+": " plus ", "=": " equals ", "°": " degrees "}
# Letters without a Unicode decomposition into base letter and accent.
_LATIN = {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"}
_LATIN |= {small.upper(): large.upper() for small, large in _LATIN.items() if small not in "ßı"}

_TAG = re.compile(r"</?[^\W\d][^\s<>]*>|(?<!\w)\[[^\W\d][^\s\[\]]*\](?!\w)")
"""A transcriber's note or a symbol, not a word: `<unk>`, `</s>`, `[noise]`."""
_TITLE = re.compile(r"(?<![\w'])(mrs?)(?![\w'])", re.IGNORECASE)
_TITLES = {"mr": "mister", "mrs": "missus"}
_PLAIN = re.compile(r"[a-zA-Z ]*(?:(?<=[a-zA-Z])'(?=[a-zA-Z])[a-zA-Z ]*)*")


class TextError(ValueError):
    """A transcript that cannot be used.

    Attributes:
        reason: "empty-text" if nothing is left after normalization, "outside-alphabet" if characters outside the
            alphabet remain.
        characters: The offending characters, sorted, each once ("" for an empty text).
    """

    def __init__(self, reason: Literal["empty-text", "outside-alphabet"], message: str, characters: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.characters = characters


class NormalizerConfig(Configuration):
    """How transcripts are normalized."""

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
    """`english` spells out numbers and symbols, and drops accents and punctuation; `basic` (any language) only drops
    punctuation; `none` only normalizes white space and Unicode composition and keeps the case; the others are families
    of writing systems (speech/scripts.py); `auto` chooses by each utterance's language."""
    case: Literal["upper", "lower", "keep"] = "lower"
    """Letter case of the result; ignored for kind `none`."""
    numbers: Literal["auto", "words", "keep"] = "auto"
    """Numbers as words: `words` spells them in the families of writing systems, too (package num2words); `auto` and
    `keep` leave digits there. `english` always spells numbers, `basic` and `none` never do."""
    punctuation: Literal["drop", "keep"] = "drop"
    """Whether punctuation stays; `english` and `basic` always drop it."""
    fold: bool = False
    """Merge spelling variants: Russian ё becomes е; Arabic alefs and Greek vowels lose their marks."""
    alphabet: str | None = None
    """Characters that the result may contain, besides the space. None allows a to z and the apostrophe for `english`
    (in the chosen case), and everything for the other kinds."""

    @property
    def keeps_form(self) -> bool:
        """Whether results have capitals or punctuation, as people write them."""
        punctuation = self.punctuation == "keep" and self.kind not in ("english", "basic")
        return self.kind == "none" or self.case == "keep" or punctuation


def _fold_typography(text: str) -> str:
    """Replaces all kinds of apostrophes by the plain one and drops paired typographic quotation marks."""
    text = _OPEN_QUOTES.sub(r" \1 ", text)
    return text.translate(_TYPOGRAPHY)


_TYPOGRAPHY = {ord(mark): APOSTROPHE for mark in _APOSTROPHES + "‘"}
_ENGLISH = {ord(sign): words for sign, words in {**_LATIN, **_SYMBOLS}.items()}


def _drop_punctuation(text: str) -> str:
    """Keeps letters, digits, marks and apostrophes, removes format characters, and replaces the rest by spaces.

    Tags go as a whole.
    """
    if "<" in text or "[" in text:
        text = _TAG.sub(" ", text)
    return "".join(_kept(character) for character in text)


def _kept(character: str) -> str:
    if character == APOSTROPHE or character.isalnum():
        return character
    category = unicodedata.category(character)
    if category[0] in "LNM":
        return character
    return "" if category == "Cf" else " "


def _spell_titles(text: str) -> str:
    """Writes out "Mr" and "Mrs", in capitals where they are."""
    if "m" not in text and "M" not in text:
        return text
    return _TITLE.sub(lambda title: _title_in_case(title[1]), text)


def _title_in_case(title: str) -> str:
    word = _TITLES[title.lower()]
    return word.upper() if title.isupper() else title[0] + word[1:]


def _clean_word(word: str) -> str:
    """Strips quotation marks from a word; an apostrophe at one end only ('tis, dogs') belongs to the word."""
    while len(word) > 1 and word[0] == word[-1] == APOSTROPHE:
        word = word[1:-1]
    return "" if word.strip(APOSTROPHE) == "" else word


def _collapse(text: str) -> str:
    # Two apostrophes in a row are a quotation mark, never an elision.
    words = re.sub(r"''+", " ", text).split() if APOSTROPHE in text else text.split()
    return " ".join(filter(None, map(_clean_word, words)))


class TextNormalizer:
    """Normalizes transcripts; calling it also checks the result against the alphabet."""

    def __init__(self, cfg: NormalizerConfig | None = None) -> None:
        self.cfg = cfg or NormalizerConfig()
        self._alphabet = self._allowed()

    def __call__(self, text: str, language: str = "") -> str:
        """Returns the normalized text.

        Args:
            text: A transcript.
            language: Its BCP 47 tag; determines the rules for kind `auto`, case mapping and the spelling of numbers.

        Raises:
            TextError: Nothing is left (reason "empty-text"), or a character is outside the alphabet
                ("outside-alphabet").
            LanguageError: `numbers` is `words`, and the language is not supported.
        """
        result = self.normalize(text, language)
        if not result:
            raise TextError("empty-text", f"nothing is left of the text {_shorten(text)} after normalization")
        if self._alphabet is not None and not self._alphabet.issuperset(result):
            outside = "".join(sorted(set(result) - self._alphabet))
            names = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in outside)
            raise TextError(
                "outside-alphabet",
                f"the text {_shorten(text)} contains {names}, outside the alphabet: "
                "add them to `alphabet`, or correct the text",
                outside,
            )
        return result

    def normalize(self, text: str, language: str = "") -> str:
        """Returns the normalized text unchecked; the result may be empty, as for a hypothesis without words."""
        kind = self._kind(language)
        if kind == "none":
            return " ".join(unicodedata.normalize("NFC", text).split())
        if kind == "english" and _PLAIN.fullmatch(text):
            return " ".join(change_case(_spell_titles(text), self.cfg.case).split())
        # For a few letters (İ, ŉ), case mapping and composition undo each other: repeat until nothing changes.
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
        if english:
            text = plain_numbers(text)
        text = _fold_typography(text)
        text = unicodedata.normalize("NFKC", text)
        if english:
            text = spell_numbers(text).translate(_ENGLISH)
            if not text.isascii():
                text = _drop_accents(text)
        text = _collapse(_drop_punctuation(text))
        text = change_case(_spell_titles(text) if english else text, self.cfg.case)
        return unicodedata.normalize("NFKC", text)

    def _family_pass(self, text: str, kind: str, language: str) -> str:
        family = FAMILIES[kind]
        if self.cfg.numbers == "words":
            english = primary(language) == "en"
            text = spell_numbers(plain_numbers(text)) if english else number_speller(language)(text)
        text = family.clean(_fold_typography(text), self.cfg.fold)
        if self.cfg.punctuation == "drop":
            text = _collapse(_drop_punctuation(text))
        text = family.clean(" ".join(text.split()), self.cfg.fold)
        return compose(change_case(text, self.cfg.case, language))

    def _allowed(self) -> frozenset[str] | None:
        if self.cfg.alphabet is not None:
            return frozenset(self.cfg.alphabet) | frozenset(unicodedata.normalize("NFC", self.cfg.alphabet)) | {" "}
        if self.cfg.kind != "english":
            return None
        letters = {"lower": LETTERS, "upper": LETTERS.upper(), "keep": LETTERS + LETTERS.upper()}[self.cfg.case]
        return frozenset(letters + APOSTROPHE + " ")


@lru_cache(maxsize=16)
def normalizer_of(cfg: NormalizerConfig) -> TextNormalizer:
    """The normalizer of a configuration, made once."""
    return TextNormalizer(cfg)


def _drop_accents(text: str) -> str:
    # Only Latin letters lose their accents: elsewhere a mark may make a different letter (the alphabet check reports
    # it).
    parts = unicodedata.normalize("NFD", text)
    kept: list[str] = []
    for character in parts:
        if unicodedata.combining(character) and kept and kept[-1].isascii():
            continue
        kept.append(character)
    return unicodedata.normalize("NFC", "".join(kept))


def _shorten(text: str, width: int = 60) -> str:
    return repr(text if len(text) <= width else text[: width - 1] + "…")
