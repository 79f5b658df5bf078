"""The space of a search: which fields of a configuration it varies, over which values, and under which conditions."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from configurable.configuration import Configuration
from configurable.wording import counted, nearest
from storage.batching import derive_seed

_POINTS = 10
"""Points at which each choice, and each of a few values of a range, is tried before a search."""
Values = dict[str, Any]
"""Values by field, such as `train.optimizer.lr`; only of fields whose conditions hold."""


class SpaceError(ValueError):
    """A space cannot be searched as described; the message names the field and the remedy."""


class ParameterConfig(Configuration):
    """Which values a search gives a field: a list of choices, or a range."""

    choices: tuple[Any, ...] = ()
    """The values to choose from, which may be sections; a list in place of this section means the same."""
    low: float | None = None
    """Lowest value of a range."""
    high: float | None = None
    """Highest value of a range."""
    log: bool = False
    """Whether the range is searched on a logarithmic scale."""
    integer: bool = False
    """Whether the range has whole numbers only."""
    points: int = Field(default=0, ge=0, le=100_000)
    """Number of values that a grid takes of a range, its ends included; 0: all whole numbers."""
    when: dict[str, Any] = Field(default_factory=dict)
    """Searched only if other fields of the space have these values (or, with a list, one of them). The name of a kind
    also stands for a section of this kind."""

    @model_validator(mode="before")
    @classmethod
    def _list_of_choices(cls, value: Any) -> Any:
        return {"choices": value} if isinstance(value, list | tuple) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With the list of choices: Prefect's server checks what a form sends."""
        described = super().__get_pydantic_json_schema__(schema, handler)
        return {"anyOf": [described, {"type": "array", "items": {}, "minItems": 1, "title": "Choices"}]}

    @model_validator(mode="after")
    def _check(self) -> "ParameterConfig":
        if self.choices:
            fields = type(self).model_fields  # deployments name those with their defaults, too
            of_ranges = ("high", "integer", "log", "low", "points")
            if given := [name for name in of_ranges if getattr(self, name) != fields[name].default]:
                raise ValueError(f"choices have no {' and no '.join(given)}: leave it out, or give a range")
            doubles = [value for number, value in enumerate(self.choices) if _among(value, self.choices[:number])]
            if doubles:
                raise ValueError(f"the choice {doubles[0]!r} is given twice: keep one of them")
        elif self.low is None or self.high is None:
            raise ValueError("give a list of choices, or a range by low and high")
        else:
            self._check_range(self.low, self.high)
        return self

    def _check_range(self, low: float, high: float) -> None:
        if not low < high:
            raise ValueError(
                f"the range from {low:g} to {high:g} is empty: low must be below high; to fix a field, set it in its "
                "own section and leave it out here"
            )
        if self.log and low <= 0:
            raise ValueError(
                f"a logarithmic range cannot begin at {low:g}: set low above 0 ({high / 1000:g}, for example), or "
                "leave out log"
            )
        if self.integer and not (low.is_integer() and high.is_integer()):
            raise ValueError(f"integer is set, but the range from {low:g} to {high:g} does not end at whole numbers")
        if self.points == 1:
            raise ValueError("points is 1: a grid takes both ends of a range, so use 2 or more")

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of a range on the scale on which it is searched; a whole number takes as much of it as another."""
        assert self.low is not None
        assert self.high is not None
        low, high = (self.low - 0.5, self.high + 0.5) if self.integer else (self.low, self.high)
        return (math.log(low), math.log(high)) if self.log else (low, high)

    def at(self, position: float) -> Any:
        """The value at a position from 0 to 1; for choices, equal parts stand for one choice each."""
        if self.choices:
            return self.choices[min(int(position * len(self.choices)), len(self.choices) - 1)]
        assert self.low is not None
        assert self.high is not None
        low, high = self.bounds
        value = low + min(max(position, 0.0), 1.0) * (high - low)
        value = min(max(math.exp(value) if self.log else value, self.low), self.high)  # exp rounds
        return round(value) if self.integer else value

    def position(self, value: Any) -> float:
        """Inverse of `at`: the middle of the part that stands for a choice."""
        if self.choices:
            number = next(number for number, choice in enumerate(self.choices) if _same(value, choice))
            return (number + 0.5) / len(self.choices)
        low, high = self.bounds
        return ((math.log(value) if self.log else value) - low) / (high - low)

    def steps(self, value: Any, other: Any) -> float:
        """How far two values are apart, in choices or in the grid's points of a range; others count as an end of it."""
        if self.choices:
            return abs(self.choices.index(value) - self.choices.index(other))
        assert self.low is not None
        assert self.high is not None
        first, second = (self.position(min(max(number, self.low), self.high)) for number in (value, other))
        points = self.points or (self.high - self.low + 1 if self.integer else 2)
        return abs(first - second) * (points - 1)

    def holds(self, value: Any) -> bool:
        """Whether the value is one of the choices or in the range."""
        if self.choices:
            return _among(value, self.choices)
        number = type(value) is int or (type(value) is float and not self.integer)
        return number and self.low is not None and self.high is not None and self.low <= value <= self.high

    def grid(self) -> Sequence[Any]:
        """The values that a grid takes, ascending.

        Raises:
            SpaceError: The range has no end of values.
        """
        if self.choices:
            return self.choices
        assert self.low is not None
        assert self.high is not None
        if self.integer and not self.points:
            return range(int(self.low), int(self.high) + 1)
        if not self.points:
            raise SpaceError(
                "a grid cannot exhaust a range of fractions: say how many values it takes (points), give a list of "
                "choices, or use another method"
            )
        scale = np.geomspace if self.log else np.linspace
        values = [float(value) for value in scale(self.low, self.high, self.points)]
        return sorted({round(value) for value in values}) if self.integer else values

    def probes(self) -> Sequence[Any]:
        """All choices, or the ends and a point within a range: a field that takes these takes all values."""
        return self.choices or (self.at(0.0), self.at(1.0), self.at(0.37))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other  # 1 is no True


def _among(value: Any, values: Sequence[Any]) -> bool:
    return any(_same(value, other) for other in values)


def _meant(wanted: Any, value: Any) -> bool:
    """Whether a condition's value is this one, or the kind of this section."""
    return _same(wanted, value) or (isinstance(value, Mapping) and value.get("kind") == wanted)


class Space:
    """The fields that a search varies, each behind those that its conditions name.

    Args:
        parameters: By field.
        section: The configuration's section that describes it, for messages.

    Raises:
        SpaceError: A condition cannot hold.
    """

    def __init__(self, parameters: Mapping[str, ParameterConfig], section: str = "search") -> None:
        self.section = section
        if not parameters:
            raise SpaceError(
                f"{section}.space is empty: name the fields to search, each with a range or a list of choices"
            )
        self.parameters: dict[str, ParameterConfig] = {}
        for name in parameters:
            self._add(name, parameters, ())

    def _add(self, name: str, parameters: Mapping[str, ParameterConfig], outer: tuple[str, ...]) -> None:
        if name in self.parameters:
            return
        if name in outer:
            raise SpaceError(
                f"{self.section}.space.{name}.when: the conditions of {' and '.join(outer)} go in a circle"
            )
        for other, wanted in parameters[name].when.items():
            where = f"{self.section}.space.{name}.when.{other}"
            if other not in parameters:
                raise SpaceError(f"{where}: conditions are on fields of the space{nearest(other, list(parameters))}")
            for value in _wanted(wanted):
                possible = parameters[other]
                if not (possible.holds(value) or any(_meant(value, choice) for choice in possible.choices)):
                    raise SpaceError(f"{where}: {other} is never {value!r} in this space: correct one of them")
            self._add(other, parameters, (*outer, name))
        self.parameters[name] = parameters[name]

    def __len__(self) -> int:
        return len(self.parameters)

    def active(self, name: str, values: Mapping[str, Any]) -> bool:
        """Whether a field is searched, given the values of the fields that its conditions name."""
        return all(
            other in values and any(_meant(value, values[other]) for value in _wanted(wanted))
            for other, wanted in self.parameters[name].when.items()
        )

    def at(self, positions: NDArray[np.float64]) -> Values:
        """The values at a point.

        Args:
            positions: From 0 to 1, in the order of the parameters [parameters].
        """
        values: Values = {}
        for (name, parameter), position in zip(self.parameters.items(), positions, strict=True):
            if self.active(name, values):
                values[name] = parameter.at(float(position))
        return values

    def positions(self, values: Mapping[str, Any]) -> NDArray[np.float64]:
        """Inverse of `at` [parameters]; NaN for fields whose conditions do not hold."""
        return np.array(
            [p.position(values[name]) if name in values else math.nan for name, p in self.parameters.items()]
        )

    def draw(self, rng: np.random.Generator) -> Values:
        """A random point; every parameter is uniform on its scale."""
        return self.at(rng.random(len(self)))

    def draw_with(self, name: str, value: Any, rng: np.random.Generator, tries: int = 100) -> Values | None:
        """A random point at which a field has a value; None if its conditions do not hold at any of some points."""
        for _ in range(tries):
            values: Values = {}
            for other, parameter in self.parameters.items():
                if self.active(other, values):
                    values[other] = value if other == name else parameter.at(float(rng.random()))
            if name in values:
                return values
        return None

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether values are a point of the space: each allowed, and of all fields whose conditions hold."""
        return values.keys() == {name for name in self.parameters if self.active(name, values)} and all(
            self.parameters[name].holds(value) for name, value in values.items()
        )

    def refused(self, why_not: Callable[[Values], str]) -> Iterator[str]:
        """A message for each field of which a choice, or a part of its range, makes no valid configuration.

        Args:
            why_not: Says why a configuration with values is not valid; empty if it is.
        """
        for name, parameter in self.parameters.items():
            rng = np.random.Generator(np.random.PCG64(derive_seed("check", name)))
            for value in parameter.probes():
                why = ""
                for _ in range(_POINTS):  # another field's value may be what does not fit
                    if (values := self.draw_with(name, value, rng)) is None:
                        why = "its conditions (when) hold nowhere"
                    elif not (why := why_not(values)):
                        break
                if why:
                    remedy = self._remedy(name, why)
                    yield f"{self.section}.space: {name}={_shown(value)} is refused: {why}{remedy}"
                    break

    def _remedy(self, name: str, why: str) -> str:
        if not self.parameters[name].choices and "must be a whole number" in why:
            return "; set integer: true"
        if others := [other for other in self.parameters if other != name and f"{other}: " in why]:
            return f"; if {others[0]} is only for other values of {name}, give it a condition (when)"
        return ""

    def axes(self) -> dict[str, Sequence[Any]]:
        """The values that a grid takes of each field.

        Raises:
            SpaceError: They have no end.
        """
        axes = {}
        for name, parameter in self.parameters.items():
            try:
                axes[name] = parameter.grid()
            except SpaceError as error:
                raise SpaceError(f"{self.section}.space.{name}: {error}") from error
        return axes

    def grid(self) -> Iterator[Values]:
        """All points of the grid, the last field varying fastest; a field whose conditions do not hold varies not.

        Raises:
            SpaceError: It has no end.
        """
        return self._points(self.axes(), {})

    def _points(self, axes: Mapping[str, Sequence[Any]], begun: Values) -> Iterator[Values]:
        if not axes:
            yield begun
            return
        name, rest = next(iter(axes)), dict(islice(axes.items(), 1, None))
        if not self.active(name, begun):
            yield from self._points(rest, begun)
            return
        for value in axes[name]:
            yield from self._points(rest, begun | {name: value})

    def grid_size(self, most: int) -> int:
        """Number of points of the grid; counts up to one more than `most`."""
        return sum(1 for _ in islice(self.grid(), most + 1))

    def __str__(self) -> str:
        return counted(len(self), "field")


def _wanted(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]
