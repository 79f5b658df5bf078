"""Normalization rules of writing systems: which signs carry no sound, and which spellings are equivalent.

    family_of("pt-BR").name          # "latin"
    FAMILIES["arabic"].clean("كِتَابٌ")  # "كتاب"

A family covers letters only: `speech.text` handles case, punctuation and the alphabet, `speech.number_words` handles
numbers. The rules follow Unicode's character properties (Unicode Standard, chapters 7 to 18) and the orthographic
conventions noted at each entry. Rules that change a spelling rather than its encoding apply only with `fold`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache

# Compatibility normalization splits these vowels into nikhahit and aa, which no keyboard types.
_NOT_DECOMPOSED = {"ำ", "ຳ"}
_HAN_GAP = re.compile(r"(?<=[⺀-鿿豈-﫿\U00020000-\U0003ffffー々〆])\s+(?=[⺀-鿿豈-﫿\U00020000-\U0003ffffー々〆])")

_UNSPACED = re.compile(r"[⺀-鿿豈-﫿\U00020000-\U0003ffffー々〆\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")


class LanguageError(ValueError):
    """A request that is not supported for a language."""


@dataclass(frozen=True)
class Family:
    """Normalization rules for one group of writing systems.

    Attributes:
        name: Name in configurations.
        silent: Characters without a sound of their own, which are dropped: vowel points, stress marks, tatweel.
        same: Variant spellings of one letter; applied only with `fold`.
        encoded: Different code points for one letter or sign; always applied.
        joined: Whether words are written without spaces, so that spaces between two characters are dropped.
    """

    name: str
    silent: re.Pattern[str] | None = None
    same: dict[int, str] = field(default_factory=dict)
    encoded: dict[int, str] = field(default_factory=dict)
    joined: bool = False

    def clean(self, text: str, fold: bool = False) -> str:
        """Apply the family's rules; the result is composed (NFC) with ASCII digits. Idempotent."""
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
        # Dictionaries and textbooks mark stress with an acute; й and ё are composed and keep their marks.
        Family("cyrillic", silent=re.compile("[\u0300\u0301]"), same=_table(е="ё", Е="Ё")),
        Family("greek", same=_table(α="ά", ε="έ", η="ή", ι="ίϊΐ", ο="ό", υ="ύϋΰ", ω="ώ")),
        Family(
            "arabic",
            silent=re.compile("[\u0640\u064b-\u0652\u0670\u06d6-\u06ed]"),  # tatweel, vowel signs, Quranic marks
            same=_table(ا="أإآٱ", ي="ىئ", و="ؤ", ه="ة"),
            encoded={0x200C: " "},  # the zero-width non-joiner separates words like a space
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
"""Families by their name in `NormalizerConfig.kind`. To add one, add an entry here and in `_LANGUAGES`."""

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
    """The primary language of a BCP 47 tag: "pt" for "pt-BR"."""
    return re.split("[-_]", language.strip().lower(), maxsplit=1)[0]


def family_of(language: str) -> Family:
    """The family of a BCP 47 tag: by its script if it has one ("sr-Latn" is latin), else by language; default latin."""
    for part in re.split("[-_]", language)[1:]:
        if part.title() in _SCRIPTS and len(part) == 4:
            return FAMILIES[_SCRIPTS[part.title()]]
    return FAMILIES[_FAMILY_OF.get(primary(language), "latin")]


def compose(text: str) -> str:
    """Compose (NFC), and replace wide, narrow, ligature and presentation forms by plain letters."""
    if not text.isascii():
        text = "".join(c if c in _NOT_DECOMPOSED or c.isascii() else _plain(c) for c in text)
    return unicodedata.normalize("NFC", text)


@lru_cache(maxsize=65536)
def _plain(character: str) -> str:
    if unicodedata.decomposition(character).startswith("<"):
        return unicodedata.normalize("NFKC", character)
    return character


def change_case(text: str, case: str, language: str = "") -> str:
    """Convert to upper or lower case by the language's rules (Turkish dotless i; Georgian has a single case)."""
    if case == "keep" or primary(language) == "ka":
        return text
    if primary(language) in ("tr", "az"):
        pairs = {"I": "ı", "İ": "i"} if case == "lower" else {"i": "İ", "ı": "I"}
        text = unicodedata.normalize("NFC", text).translate({ord(source): target for source, target in pairs.items()})
    return text.lower() if case == "lower" else text.upper()


def is_unspaced(letter: str) -> bool:
    """Whether words with a letter are written without spaces: Chinese, Japanese, Thai, Lao, Burmese, Khmer."""
    return _UNSPACED.match(letter) is not None


def ascii_digits(text: str) -> str:
    """Replace decimal digits of any script by 0 to 9."""
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
