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

LETTERS = "abcdefghijklmnopqrstuvwxyz"
APOSTROPHE = "'"

# fmt: off
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
LARGEST_NUMBER = 999_999_999

_APOSTROPHES = "’ʼ＇`´′‛ʹ"
_OPEN_QUOTES = re.compile(r"‘(.*?)’(?!\w)")
_CURRENCIES = {"$": ("dollar", "cent"), "£": ("pound", "pence"), "€": ("euro", "cent")}
_SYMBOLS = {"&": " and ", "%": " percent ", "@": " at ", "+": " plus ", "=": " equals ", "°": " degrees "}
_FRACTIONS = {ord("½"): " one half ", ord("¼"): " one quarter ", ord("¾"): " three quarters "}
# Letters that Unicode does not decompose into a base letter and an accent.
_LATIN = {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"}
_LATIN |= {small.upper(): large.upper() for small, large in _LATIN.items() if small not in "ßı"}

_DIGITS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_MONEY = re.compile(
    rf"([$£€])\s?({_DIGITS})(?:\.([0-9]{{2}})(?![0-9])|(\.[0-9]+))?(\s(?:hundred|thousand|million|billion|trillion)\b)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    rf"(?:(?<!\S)([-−]))?(?:({_DIGITS})(?:\.([0-9]+)|(st|nd|rd|th)\b)?|(?<![\w.])\.([0-9]+))", re.IGNORECASE
)
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

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    kind: Literal["english", "basic", "none"] = "english"
    """`english` spells numbers and symbols, drops accents and punctuation; `basic` (any language) drops punctuation
    only; `none` leaves the text as it is except for white space and Unicode composition (its case too)."""
    case: Literal["upper", "lower", "keep"] = "lower"
    """Letter case of the result; without effect for kind `none`."""
    alphabet: str | None = None
    """The characters that may remain; a space is always allowed. None: the letters a to z and the apostrophe for
    `english` (in the chosen case), everything for the other kinds."""


def number_words(number: int) -> str:
    """Reads a whole number in 0 ... 999,999,999 as English words: 1203 is "one thousand two hundred three".

    Raises:
        ValueError: The number is outside that range.
    """
    if not 0 <= number <= LARGEST_NUMBER:
        raise ValueError(f"number_words reads 0 to {LARGEST_NUMBER:,}, not {number:,}")
    words: list[str] = []
    for scale, name in ((1_000_000, "million"), (1_000, "thousand"), (1, "")):
        group, number = divmod(number, scale)
        if group:
            words += [*_below_thousand(group), *([name] if name else [])]
    return " ".join(words) or _ONES[0]


def ordinal_words(number: int) -> str:
    """Reads an ordinal in 0 ... 999,999,999: 22 is "twenty second".

    Raises:
        ValueError: The number is outside that range.
    """
    *head, last = number_words(number).split()
    regular = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return " ".join([*head, _ORDINALS.get(last, regular)])


def _below_thousand(number: int) -> list[str]:
    hundreds, rest = divmod(number, 100)
    words = [_ONES[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(_TENS[rest // 10])
        rest %= 10
    if rest:
        words.append(_ONES[rest])
    return words


def _digit_words(digits: str) -> str:
    return " ".join(_ONES[int(digit)] for digit in digits)


def _read(digits: str, *, ordinal: bool = False) -> str:
    """Reads a run of digits; a leading zero (a code, "007") or too many of them (a serial number) means one by one."""
    digits = digits.replace(",", "")
    if len(digits) > len(str(LARGEST_NUMBER)) or (digits[0] == "0" and len(digits) > 1):
        return _digit_words(digits)
    return ordinal_words(int(digits)) if ordinal else number_words(int(digits))


def _money(match: re.Match[str]) -> str:
    sign, whole, cents, fraction, scale = match.groups()
    one, hundredth = _CURRENCIES[sign]
    if scale:
        tail = f" point {_digit_words(cents or fraction[1:])}" if cents or fraction else ""
        return f" {_read(whole)}{tail}{scale} {one}s "
    if fraction:
        return f" {_read(whole)} point {_digit_words(fraction[1:])} {one}s "
    words = f" {_read(whole)} {one if whole == '1' else one + 's'} "
    if cents and cents != "00":
        amount = int(cents)
        name = "penny" if hundredth == "pence" and amount == 1 else hundredth
        words += f"and {number_words(amount)} {name if amount == 1 or hundredth == 'pence' else name + 's'} "
    return words


def _number(match: re.Match[str]) -> str:
    minus, whole, decimals, suffix, bare_decimals = match.groups()
    words = ["minus"] if minus else []
    if whole:
        words.append(_read(whole, ordinal=suffix is not None))
    if decimals or bare_decimals:
        words += ["point", _digit_words(decimals or bare_decimals)]
    return f" {' '.join(words)} "


def _spell_numbers(text: str) -> str:
    return _NUMBER.sub(_number, _MONEY.sub(_money, text))


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

    def __call__(self, text: str) -> str:
        """Returns the normalized text.

        Raises:
            TextError: Nothing is left (reason "empty-text"), or a character lies outside the alphabet
                ("outside-alphabet").
        """
        result = self.normalize(text)
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

    def normalize(self, text: str) -> str:
        """Returns the normalized text without any check; the result may be empty (as a silent hypothesis is)."""
        if self.cfg.kind == "none":
            return " ".join(unicodedata.normalize("NFC", text).split())
        if self.cfg.kind == "english" and _PLAIN.fullmatch(text):
            return " ".join(self._case(text).split())
        # Case mapping and composition can undo each other for a few letters (İ, ŉ): go on until nothing changes.
        for _ in range(8):
            before, text = text, self._one_pass(text)
            if text == before:
                break
        return text

    def _one_pass(self, text: str) -> str:
        english = self.cfg.kind == "english"
        if english and not text.isascii():
            text = text.translate(_FRACTIONS)
        text = _fold_typography(text)
        text = unicodedata.normalize("NFKC", text)
        if english:
            text = _spell_numbers(text).translate(_ENGLISH)
            if not text.isascii():
                text = _drop_accents(text)
        return unicodedata.normalize("NFKC", self._case(_collapse(_drop_punctuation(text))))

    def _case(self, text: str) -> str:
        if self.cfg.case == "keep":
            return text
        return text.upper() if self.cfg.case == "upper" else text.lower()

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
