"""What the writing systems need of a text normalizer: which signs carry no sound, and which spellings are one.

    family_of("pt-BR").name          # "latin"
    FAMILIES["arabic"].clean("كِتَابٌ")  # "كتاب"

A family knows letters only: case, punctuation and the alphabet are the normalizer's business (`speech.text`), and
numbers are `number_speller`'s. Rules are Unicode's own properties (Unicode Standard, chapters 7 to 18) plus the customs
that each entry names; whatever changes a spelling rather than its encoding happens only where `fold` is asked for.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

# Compatibility composition takes these vowels apart into a nikhahit and an aa, which no keyboard types.
_NOT_DECOMPOSED = {"ำ", "ຳ"}
_DIGITS = re.compile(r"(?<!\w)\d+(?!\w)")
_HAN_GAP = re.compile(r"(?<=[⺀-鿿豈-﫿\U00020000-\U0003ffffー々〆])\s+(?=[⺀-鿿豈-﫿\U00020000-\U0003ffffー々〆])")


class LanguageError(ValueError):
    """A request that is not supported for a language."""


@dataclass(frozen=True)
class Family:
    """How the texts of one group of writing systems are brought to one form.

    Attributes:
        name: Name in configurations.
        silent: Characters without a sound of their own, dropped: vowel points, stress marks, stretching.
        same: Spellings of one letter that differ by custom only; applied where `fold` is asked for.
        encoded: Characters that look and sound alike and differ in their code only; always applied.
        joined: Whether words are written without spaces, so that a space between two characters means nothing.
    """

    name: str
    silent: re.Pattern[str] | None = None
    same: dict[int, str] = field(default_factory=dict)
    encoded: dict[int, str] = field(default_factory=dict)
    joined: bool = False

    def clean(self, text: str, fold: bool = False) -> str:
        """The text by the family's rules, composed (NFC), its digits 0 to 9; applying it twice changes nothing."""
        text = ascii_digits(compose(text.translate(self.encoded)))
        if self.silent is not None:
            text = unicodedata.normalize("NFC", self.silent.sub("", text))
        if fold and self.same:
            text = unicodedata.normalize("NFC", text.translate(self.same))
        return _HAN_GAP.sub("", text) if self.joined else text


def _table(**pairs: str) -> dict[int, str]:
    return {ord(source): target for target, sources in pairs.items() for source in sources}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("latin"),
        # Dictionaries and schoolbooks mark the stress with an acute; й and ё are composed and keep their marks.
        Family("cyrillic", silent=re.compile("[\u0300\u0301]"), same=_table(е="ё", Е="Ё")),
        Family("greek", same=_table(α="ά", ε="έ", η="ή", ι="ίϊΐ", ο="ό", υ="ύϋΰ", ω="ώ")),
        Family(
            "arabic",
            silent=re.compile("[\u0640\u064b-\u0652\u0670\u06d6-\u06ed]"),  # tatweel, vowel signs, Quranic marks
            same=_table(ا="أإآٱ", ي="ىئ", و="ؤ", ه="ة"),
            encoded={0x200C: " "},  # the zero-width non-joiner parts words as a space does
        ),
        Family(
            "persian",
            silent=re.compile("[\u0640\u064b-\u0652\u0670]"),
            same=_table(ا="أإآٱ", و="ؤ", ه="ة"),
            encoded={**_table(ی="يى", ک="ك"), 0x200C: " "},  # Arabic keyboards type the Arabic code points
        ),
        Family(
            "hebrew",
            silent=re.compile("[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7״]"),
            encoded=_table(**{"'": "׳"}),
        ),
        Family("indic", encoded={0x200C: "", 0x200D: ""}),  # joiners choose a glyph, not a sound
        Family("thai"),
        Family("korean"),
        Family("cjk", joined=True),
    )
}
"""Families by the name that `NormalizerConfig.kind` takes: a new one is an entry here and in `_LANGUAGES`."""

_LANGUAGES = {
    "cyrillic": "ru uk be bg mk sr kk ky mn tg tt ba cv ce os sah",
    "greek": "el",
    "arabic": "ar arz ary apc ps ug sd",
    "persian": "fa ur ckb",
    "hebrew": "he yi",
    "indic": "hi bn ta te mr gu kn ml pa or as ne si sa",
    "thai": "th lo km my",
    "korean": "ko",
    "cjk": "zh ja yue cmn nan wuu hak",
}
_FAMILY_OF = {language: family for family, languages in _LANGUAGES.items() for language in languages.split()}
_SCRIPTS = {"Cyrl": "cyrillic", "Latn": "latin", "Arab": "arabic", "Grek": "greek", "Hebr": "hebrew", "Deva": "indic"}


def primary(language: str) -> str:
    """The language of a BCP 47 tag: "pt" of "pt-BR"."""
    return re.split("[-_]", language.strip().lower(), maxsplit=1)[0]


def family_of(language: str) -> Family:
    """The family of a BCP 47 tag; a script in it decides ("sr-Latn" is latin), an unknown language is latin."""
    for part in re.split("[-_]", language)[1:]:
        if part.title() in _SCRIPTS and len(part) == 4:
            return FAMILIES[_SCRIPTS[part.title()]]
    return FAMILIES[_FAMILY_OF.get(primary(language), "latin")]


def compose(text: str) -> str:
    """NFC, with wide, narrow, ligature and presentation forms replaced by the plain letters that they stand for."""
    if not text.isascii():
        text = "".join(c if c in _NOT_DECOMPOSED or c.isascii() else _plain(c) for c in text)
    return unicodedata.normalize("NFC", text)


@lru_cache(maxsize=65536)
def _plain(character: str) -> str:
    if unicodedata.decomposition(character).startswith("<"):
        return unicodedata.normalize("NFKC", character)
    return character


def change_case(text: str, case: str, language: str = "") -> str:
    """Upper or lower case by the language's rules: a Turkish I is dotless, and a Georgian text has one case."""
    if case == "keep" or primary(language) == "ka":
        return text
    if primary(language) in ("tr", "az"):
        pairs = {"I": "ı", "İ": "i"} if case == "lower" else {"i": "İ", "ı": "I"}
        text = unicodedata.normalize("NFC", text).translate({ord(source): target for source, target in pairs.items()})
    return text.lower() if case == "lower" else text.upper()


def ascii_digits(text: str) -> str:
    """Decimal digits of any script as 0 to 9."""
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)


@lru_cache(maxsize=64)
def number_speller(language: str) -> Callable[[str], str]:
    """A function that spells the whole numbers in a text as words of a language (package num2words).

    Decimals, dates and times are read part by part ("3,5" as three, five): how they are said depends on more than the
    language. Codes that begin with 0 and numbers of more than 15 digits are read digit by digit; digits that touch a
    letter stay.

    Raises:
        LanguageError: num2words is not installed, or does not know the language.
    """
    try:
        from num2words import num2words  # type: ignore[import-untyped]
    except ImportError as error:
        raise LanguageError(
            "numbers as words in languages other than English need the package num2words: pip install num2words, or "
            "set data.normalizer.numbers: keep"
        ) from error
    name = primary(language)
    try:
        num2words(1, lang=name)
    except NotImplementedError as error:
        raise LanguageError(
            f"num2words cannot read numbers in {language!r}: set data.normalizer.numbers: keep"
        ) from error

    def spell(match: re.Match[str]) -> str:
        digits = match.group()
        by_digit = len(digits) > 15 or (len(digits) > 1 and digits[0] == "0")
        parts = list(digits) if by_digit else [digits]
        return " ".join(str(num2words(int(part), lang=name)) for part in parts)

    return lambda text: _DIGITS.sub(spell, ascii_digits(text))
