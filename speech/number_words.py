"""Spells numbers, percentages and sums of money in other languages than English (package num2words).

    number_speller("de")("1.000 €, 20 % und 3,5")   # "eintausend Euro , zwanzig Prozent und drei Komma fünf"

What separates thousands and decimals depends on the language: a thousand is "1.000" in German, "1 000" in French,
"1'000" in Switzerland, "1,000" in Japanese and in Mexican Spanish.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from speech.scripts import LanguageError, ascii_digits, primary

_FIXED_SPACES = "\u00a0\u202f\u2009"
"""No-break, narrow no-break and thin space: between groups of three digits, they separate thousands in any language."""
_GROUPS = {
    ".": "az bs ca da de el es eu gl hr id is it nl pt ro sl sr tr vi",
    " ": "be bg cs et fi fr hu kk lt lv nb nn no pl ru sk sv uk",
    ",": "bn he hi ja kn ko ml mr ta te th yue zh",
    "'’": "de fr it rm",
    "٬": "ar fa ur",
}
"""What separates thousands, and in which languages."""
_POINT_REGIONS = dict.fromkeys(("de-ch", "de-li", "fr-ch", "it-ch"), "'’")
_POINT_REGIONS |= dict.fromkeys(("es-do", "es-gt", "es-hn", "es-mx", "es-ni", "es-pa", "es-pr", "es-sv", "es-us"), ",")
"""What separates thousands in regions with a decimal point."""
_SPACELESS = frozenset({"ja", "th"})
"""Languages that write numbers and words without a space between them."""
_CODES = {"EUR": "€", "USD": "$", "GBP": "£", "JPY": "¥", "CHF": "₣"}
_LONGEST = 15
"""Numbers with more digits are read digit by digit."""


@dataclass(frozen=True)
class _Reading:
    """How a language reads what stands beside numbers.

    Units have a form for all numbers; or one each for one and others; or, as in Slavic languages, for one, few and
    many. A form for one with a space in it is the whole phrase for exactly one.
    """

    point: str = ""
    """The decimal comma; without a word for it, decimals are read part by part."""
    by_digit: bool = False
    """Whether decimals are read digit by digit, not as a number."""
    percent: tuple[str, ...] = ()
    money: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Currencies by their sign."""
    hundredths: str = ""
    """Word between a currency and its hundredths."""


def _money(**signs: str) -> dict[str, tuple[str, ...]]:
    names = {"euro": "€", "dollar": "$", "pound": "£", "yen": "¥", "franc": "₣"}
    return {names[name]: tuple(forms.split("/")) for name, forms in signs.items()}


_GERMAN = _money(
    euro="ein Euro/Euro",
    dollar="ein Dollar/Dollar",
    pound="ein Pfund/Pfund",
    yen="ein Yen/Yen",
    franc="ein Franken/Franken",
)
_FRENCH = _money(
    euro="un euro/euros",
    dollar="un dollar/dollars",
    pound="une livre/livres",
    yen="un yen/yens",
    franc="un franc/francs",
)
_SPANISH = _money(euro="un euro/euros", dollar="un dólar/dólares", pound="una libra/libras", yen="un yen/yenes")
_ITALIAN = _money(
    euro="un euro/euro",
    dollar="un dollaro/dollari",
    pound="una sterlina/sterline",
    yen="uno yen/yen",
    franc="un franco/franchi",
)
_PORTUGUESE = _money(euro="um euro/euros", dollar="um dólar/dólares", pound="uma libra/libras", yen="um iene/ienes")
_READINGS = {
    "de": _Reading("Komma", True, ("ein Prozent", "Prozent"), _GERMAN),
    "fr": _Reading("virgule", False, ("pour cent",), _FRENCH),
    "es": _Reading("coma", False, ("por ciento",), _SPANISH, "con"),
    "it": _Reading("virgola", False, ("per cento",), _ITALIAN, "e"),
    "pt": _Reading("vírgula", False, ("por cento",), _PORTUGUESE, "e"),
    "nl": _Reading("komma", False, ("procent",), _money(euro="euro", dollar="dollar", pound="pond", yen="yen")),
    "da": _Reading("komma", False, ("procent",), _money(euro="euro", dollar="dollar", pound="pund", yen="yen")),
    "sv": _Reading("komma", False, ("procent",), _money(euro="euro", dollar="dollar", pound="pund", yen="yen")),
    "no": _Reading("komma", False, ("prosent",), _money(euro="euro", dollar="dollar", pound="pund", yen="yen")),
    "fi": _Reading("pilkku", True, ("yksi prosentti", "prosenttia"), _money(euro="yksi euro/euroa")),
    "ca": _Reading("coma", False, ("per cent",), _money(euro="un euro/euros", dollar="un dòlar/dòlars"), "amb"),
    "pl": _Reading("przecinek", False, ("procent",), _money(euro="euro", dollar="jeden dolar/dolary/dolarów")),
    "cs": _Reading("", False, ("jedno procento", "procenta", "procent"), _money(euro="euro")),
    "ru": _Reading(
        "", False, ("процент", "процента", "процентов"), _money(euro="евро", dollar="доллар/доллара/долларов")
    ),
    "uk": _Reading(
        "", False, ("відсоток", "відсотки", "відсотків"), _money(euro="євро", dollar="долар/долари/доларів")
    ),
    "id": _Reading("koma", True, ("persen",), _money(euro="euro", dollar="dolar")),
    "vi": _Reading("phẩy", True, ("phần trăm",), _money(euro="euro", dollar="đô la")),
    "ja": _Reading("", False, ("パーセント",), _money(euro="ユーロ", dollar="ドル", yen="円")),
    "ko": _Reading("", False, ("퍼센트",), _money(euro="유로", dollar="달러", yen="엔")),
}
_ALIASES = {"nb": "no", "nn": "no"}


@lru_cache(maxsize=64)
def number_speller(language: str) -> Callable[[str], str]:
    """Return a function that spells the numbers in a text in a language, with per cent signs and currencies.

    Dates and times are read part by part ("12:30" as twelve, thirty), because their reading depends on more than the
    language; so are decimals in languages without an entry here. Codes with a leading 0 and numbers of more than 15
    digits are read digit by digit. Digits next to a letter stay.

    Args:
        language: A BCP 47 tag.

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
    name = _ALIASES.get(primary(language), primary(language))
    try:
        num2words(1, lang=name)
    except NotImplementedError as error:
        raise LanguageError(
            f"num2words cannot read numbers in {language!r}: set data.normalizer.numbers: keep"
        ) from error

    def whole(number: int) -> str:
        return str(num2words(number, lang=name))

    return _Speller(whole, name, language.strip().lower().replace("_", "-")[:5])


class _Speller:
    """Spells the numbers in texts.

    Args:
        whole: Spells a whole number.
        name: The language.
        region: Language and region, such as "de-ch".
    """

    def __init__(self, whole: Callable[[int], str], name: str, region: str) -> None:
        self._whole, self._reading = whole, _READINGS.get(name, _Reading())
        self._apocope = name == "es"  # "uno" loses its last letter before a unit
        usual = "".join(signs for signs, names in _GROUPS.items() if name in names.split())
        separators = _FIXED_SPACES + _POINT_REGIONS.get(region, usual)
        self._separators = re.compile(f"[{re.escape(separators)}]")
        # at most as many groups as are read as a number, so that long lists of digits take linear time
        grouped = "|".join(rf"\d{{1,3}}(?:{re.escape(separator)}\d{{3}}){{1,5}}" for separator in separators)
        # with commas, groups of two digits above the thousands as in India, too
        indian = r"|\d{1,2}(?:,\d{2}){1,6},\d{3}" if "," in separators else ""
        mark = "[.]" if region in _POINT_REGIONS else ","
        decimals = rf"(?:{mark}(\d+))?" if self._reading.point else "()"
        number = rf"((?:{grouped}{indian})(?!\d)|\d+){decimals}"
        signs = "|".join(map(re.escape, [*self._reading.money, *_CODES]))
        space = rf"[ {_FIXED_SPACES}]?"
        letter = r"[A-Za-z0-9_]" if name in _SPACELESS else r"\w"
        before, after = rf"(?<!{letter})(?<![.,])", rf"(?!{letter}|[.,]\d)"
        self._patterns: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
            (re.compile(rf"{before}{number}{space}({signs})(?!{letter})"), lambda m: self._sum(m[1], m[2], m[3])),
            (re.compile(rf"(?<!{letter})({signs}){space}{number}{after}"), lambda m: self._sum(m[2], m[3], m[1])),
            (re.compile(rf"{before}{number}{space}%"), lambda m: self._share(m[1], m[2])),
            (re.compile(rf"{before}{number}{after}"), lambda m: self._number(m[1], m[2])),
            (re.compile(rf"(?<!{letter})(\d+)()(?!{letter})"), lambda m: self._number(m[1], m[2])),
        )

    def __call__(self, text: str) -> str:
        """The text with words in place of numbers."""
        text = ascii_digits(text)
        if any(character.isdigit() for character in text):
            for pattern, spell in self._patterns:
                text = pattern.sub(spell, text)
        if self._reading.percent:
            text = text.replace("%", f" {self._reading.percent[-1]} ")
        return text

    def _number(self, digits: str, decimals: str | None) -> str:
        words = [self._digits(self._separators.sub("", digits))]
        if decimals:
            as_number = not self._reading.by_digit and len(decimals) <= 3 and decimals[0] != "0"
            words += [self._reading.point, *map(self._digits, [decimals] if as_number else decimals)]
        return " ".join(words)

    def _digits(self, digits: str) -> str:
        by_digit = len(digits) > _LONGEST or (len(digits) > 1 and digits[0] == "0")
        return " ".join(self._whole(int(part)) for part in (digits if by_digit else [digits]))

    def _share(self, digits: str, decimals: str | None) -> str:
        if not self._reading.percent:
            return f"{self._number(digits, decimals)} %"
        return self._with_unit(digits, decimals, self._reading.percent)

    def _sum(self, digits: str, decimals: str | None, sign: str) -> str:
        forms = self._reading.money.get(_CODES.get(sign, sign))
        if forms is None:
            return f"{self._number(digits, decimals)} {sign}"
        if decimals is None or len(decimals) != 2:
            return self._with_unit(digits, decimals, forms, self._apocope)
        units = self._with_unit(digits, None, forms, self._apocope)
        if decimals == "00":
            return units
        return " ".join([units, *filter(None, [self._reading.hundredths]), self._whole(int(decimals))])

    def _with_unit(self, digits: str, decimals: str | None, forms: tuple[str, ...], apocope: bool = False) -> str:
        amount = self._separators.sub("", digits)
        form = _form(int(amount), bool(decimals), forms)
        if " " in forms[form] and len(forms) > 1:
            return forms[form]
        words = self._number(digits, decimals)
        if apocope and words.endswith("uno"):
            words = f"{words[:-3]}{'ún' if words.endswith('veintiuno') else 'un'}"
        return f"{words} {forms[form]}"


def _form(amount: int, fraction: bool, forms: tuple[str, ...]) -> int:
    """Which form of a unit goes with a number."""
    singular = amount % 10 == 1 and amount % 100 != 11 if len(forms) == 3 and " " not in forms[0] else amount == 1
    if singular and not fraction:
        return 0
    few = fraction or (amount % 10 in (2, 3, 4) and amount % 100 not in (12, 13, 14))
    return 1 if len(forms) == 3 and few else len(forms) - 1
