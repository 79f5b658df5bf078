"""Spells English numbers, ordinals and sums of money the short American way ("one hundred one").

Years, dates and abbreviations are not interpreted: without context, no rule gets them right.
"""

from __future__ import annotations

import re

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

_CURRENCIES = {"$": ("dollar", "cent"), "£": ("pound", "pence"), "€": ("euro", "cent")}
_DIGITS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_MONEY = re.compile(
    rf"([$£€])\s?({_DIGITS})(?:\.([0-9]{{2}})(?![0-9])|(\.[0-9]+))?(\s(?:hundred|thousand|million|billion|trillion)\b)?",
    re.IGNORECASE,
)
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


def spell_numbers(text: str) -> str:
    """Writes out every number, ordinal and sum of money in a text."""
    return _NUMBER.sub(_number, _MONEY.sub(_money, text))
