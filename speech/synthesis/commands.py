"""A small grammar of spoken commands for a smart home, a telephone, a calculator and a robot.

About 75 words form many millions of sentences, so a recognizer has to learn words, not sentences.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_UNITS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ROOMS = ("kitchen", "bedroom", "garage", "office", "garden")
_DEVICES = ("lights", "heater", "fan", "radio")
_OTHERS = (
    "a",
    "at",
    "back",
    "call",
    "close",
    "degrees",
    "dial",
    "door",
    "for",
    "forward",
    "hours",
    "is",
    "left",
    "lock",
    "me",
    "minus",
    "minutes",
    "move",
    "off",
    "on",
    "open",
    "play",
    "plus",
    "right",
    "room",
    "seconds",
    "set",
    "steps",
    "the",
    "timer",
    "times",
    "to",
    "track",
    "turn",
    "wake",
    "what",
    "window",
)


def spell_number(number: int) -> str:
    """Spell a number from 0 to 99.

    Raises:
        ValueError: the number is out of range.
    """
    if not 0 <= number <= 99:
        raise ValueError(f"cannot spell {number}: only numbers from 0 to 99")
    if number < 20:
        return _UNITS[number]
    tens, unit = divmod(number, 10)
    return _TENS[tens - 2] if unit == 0 else f"{_TENS[tens - 2]} {_UNITS[unit]}"


def _digits(rng: random.Random, low: int, high: int) -> str:
    return " ".join(_UNITS[rng.randrange(10)] for _ in range(rng.randint(low, high)))


def _number(rng: random.Random, low: int = 0, high: int = 99) -> str:
    return spell_number(rng.randint(low, high))


def _switch(rng: random.Random) -> str:
    return f"turn the {rng.choice(_ROOMS)} {rng.choice(_DEVICES)} {rng.choice(('on', 'off'))}"


def _timer(rng: random.Random) -> str:
    return f"set a timer for {_number(rng, 2)} {rng.choice(('seconds', 'minutes', 'hours'))}"


def _heater(rng: random.Random) -> str:
    return f"set the {rng.choice(_ROOMS)} heater to {_number(rng, 5, 35)} degrees"


def _door(rng: random.Random) -> str:
    return f"{rng.choice(('open', 'close', 'lock'))} the {rng.choice(_ROOMS)} {rng.choice(('door', 'window'))}"


def _call(rng: random.Random) -> str:
    return f"call room {_digits(rng, 3, 3)}"


def _dial(rng: random.Random) -> str:
    return f"dial {_digits(rng, 4, 6)}"


def _track(rng: random.Random) -> str:
    return f"play track {_number(rng, 1)}"


def _wake(rng: random.Random) -> str:
    return f"wake me at {_number(rng, 1, 12)} {_number(rng, 10, 59)}"


def _sum(rng: random.Random) -> str:
    return f"what is {_number(rng)} {rng.choice(('plus', 'minus', 'times'))} {_number(rng)}"


def _move(rng: random.Random) -> str:
    return f"move {rng.choice(('left', 'right', 'forward', 'back'))} {_number(rng, 2)} steps"


_COMMANDS: tuple[Callable[[random.Random], str], ...] = (
    _switch,
    _timer,
    _heater,
    _door,
    _call,
    _dial,
    _track,
    _wake,
    _sum,
    _move,
)

VOCABULARY: tuple[str, ...] = tuple(
    sorted(
        {
            *_UNITS,
            *_TENS,
            *_ROOMS,
            *_DEVICES,
            *_OTHERS,
        }
    )
)
"""All words of the commands, sorted."""


def random_command(rng: random.Random) -> str:
    """Draw a command: lower-case words of `VOCABULARY`, separated by single spaces; deterministic given `rng`."""
    return rng.choice(_COMMANDS)(rng)
