"""Spells English numbers, ordinals, fractions and sums of money the short American way ("one hundred one").

Years, dates and abbreviations are not interpreted: without context, no rule gets them right.
"""

from __future__ import annotations

import re
import unicodedata

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

_CURRENCIES = {"$": ("dollar", "cent"), "£": ("pound", "pence"), "€": ("euro", "cent"), "¥": ("yen", "sen")}
_SCALES = {"k": "thousand", "m": "million", "mn": "million", "mln": "million", "b": "billion", "bn": "billion"}
_SCALES |= {"tn": "trillion", "trn": "trillion"}
_FIXED = "[\u00a0\u202f\u2009]"  # no-break, narrow no-break and thin space
# In India, 1,00,000. Bounded, so that long lists of digits take linear time.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,5}|[0-9]{1,2}(?:,[0-9]{2}){1,6},[0-9]{3})(?![0-9])|[0-9]+"
_AMOUNT = rf"({_DIGITS})(?:\.([0-9]{{2}})(?![0-9])|(\.[0-9]+))?"
_SCALE = r"(?:\s(hundred|thousand|million|billion|trillion)\b|(\s?(?:mn|mln|bn|tn|trn)|[kmb])\b)?"
_MONEY = re.compile(rf"([$£€¥])\s?{_AMOUNT}{_SCALE}", re.IGNORECASE)
_MONEY_AFTER = re.compile(rf"(?<![\w.,/$£€¥]){_AMOUNT}()()\s?([$£€¥])(?!\w)")
# Only parts that recipes and measures have: others, such as 9/11 and 24/7, are dates and names.
_FRACTION = re.compile(
    r"(?:(?<=[0-9])(?<![0-9]{4})(\s)|(?<![\w./,⁄]))([0-9]{1,2})(?:/(2|3|4|5|8)|⁄([0-9]{1,2}))(?![\w/⁄]|[.,][0-9])"
)
_VULGAR = re.compile(r"\s?([¼-¾⅐-⅞])")
_GROUPS = re.compile(rf"(?<![0-9])[0-9]{{1,3}}(?:{_FIXED}[0-9]{{3}}){{1,5}}(?![0-9])")
_NUMBER = re.compile(
    rf"(?:(?<!\S)([-−]))?(?:({_DIGITS})(?:\.([0-9]+)|(st|nd|rd|th)\b)?|(?<![\w.])\.([0-9]+))", re.IGNORECASE
)


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
    """Spells a run of digits; codes with a leading zero ("007") and very long numbers are read digit by digit."""
    digits = digits.replace(",", "")
    if len(digits) > len(str(LARGEST_NUMBER)) or (digits[0] == "0" and len(digits) > 1):
        return _digit_words(digits)
    return ordinal_words(int(digits)) if ordinal else number_words(int(digits))


def _money(match: re.Match[str]) -> str:
    return _sum(*match.groups())


def _money_after(match: re.Match[str]) -> str:
    *amount, sign = match.groups()
    return _sum(sign, *amount)


def _sum(sign: str, whole: str, cents: str | None, fraction: str | None, word: str | None, letters: str | None) -> str:
    singular, hundredth = _CURRENCIES[sign]
    several = singular if singular == "yen" else f"{singular}s"
    if scale := word or _SCALES.get((letters or "").strip().lower()):
        decimals = cents or (fraction or "")[1:]
        tail = f" point {_digit_words(decimals)}" if decimals else ""
        return f" {_read(whole)}{tail} {scale} {several} "
    if fraction:
        return f" {_read(whole)} point {_digit_words(fraction[1:])} {several} "
    words = f" {_read(whole)} {singular if whole == '1' else several} "
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


def _fraction(match: re.Match[str]) -> str:
    gap, numerator, denominator = match[1], int(match[2]), int(match[3] or match[4])
    if not 0 < numerator < denominator:
        return match[0]
    part = {2: "half", 4: "quarter"}.get(denominator) or ordinal_words(denominator)
    return f"{' and' if gap else ''} {number_words(numerator)} {part if numerator == 1 else part + 's'} "


def plain_numbers(text: str) -> str:
    """Writes numbers without the signs that compatibility normalization would mistake.

    Fractions of one character (½) become several, with a space before them, and spaces between groups of digits commas.
    """
    if text.isascii():
        return text
    text = _VULGAR.sub(lambda match: f" {unicodedata.normalize('NFKC', match[1])} ", text)
    return _GROUPS.sub(lambda match: re.sub(_FIXED, ",", match[0]), text)


def spell_numbers(text: str) -> str:
    """Writes out every number, ordinal, fraction, percentage and sum of money in a text."""
    text = _MONEY.sub(_money, _MONEY_AFTER.sub(_money_after, text))
    return _NUMBER.sub(_number, _FRACTION.sub(_fraction, text)).replace("%", " percent ")
