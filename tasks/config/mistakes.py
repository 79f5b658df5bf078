"""Mistakes in a configuration: one line each, with the field, what is wrong, and what to write instead."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from configurable.choices import choice_of
from configurable.wording import counted, nearest, similar
from tasks.config.given import Place

_PLAIN = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    "finite_number": "must be a finite number",
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    "string_type": "must be text",
    **dict.fromkeys(("tuple_type", "list_type", "set_type", "frozen_set_type"), "must be a list"),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type"), "must be a mapping of fields"
    ),
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "too few items: at least {min_length}, not {actual_length}",
    "too_long": "too many items: at most {max_length}, not {actual_length}",
    "missing": "this field is required",
    "extra_forbidden": "there is no such field",
}
"""Messages by pydantic's type of error."""
_SAY_WHAT_IS_GIVEN = {
    *("value_error", "missing", "union_tag_invalid", "literal_error", "too_short", "too_long", "extra_forbidden")
}
"""Types of errors whose message needs no value that was given."""
_MISSPELLED = 0.75
"""Minimum similarity of a misspelled name of a field to the right one, if it is looked for in other sections, too."""
_PROPOSED = 3
"""Maximum number of fields that a message proposes."""


def choices(model: type[BaseModel], place: str = "") -> Iterator[str]:
    """Fields below a model that take one of several kinds, as dotted names."""
    for name, field in model.model_fields.items():
        here = f"{place}{field.alias or name}"
        if choice_of(field):
            yield here
        for below in _models_in(field.annotation):
            yield from choices(below, f"{here}.")


def explained(
    error: ValidationError, root: type[BaseModel], line_of: Callable[[Place], str] = lambda _: ""
) -> list[str]:
    """A line for each mistake.

    Args:
        error: What pydantic found.
        root: Class of the whole configuration.
        line_of: `FILE:LINE` of a place in the configuration; empty if there is none.
    """
    return [_explain(problem, root, line_of) for problem in _own_problems(error)]


def listed(source: str, lines: Sequence[str]) -> str:
    """Mistakes of a configuration as one message: its name, and a line for each."""
    return f"{source} has {counted(len(lines), 'wrong field')}:\n  " + "\n  ".join(lines)


def plainly(error: ValidationError) -> list[str]:
    """A line for each mistake, with the field by its name in the class that was checked."""
    mistakes = []
    for problem in _own_problems(error):
        field, message = ".".join(map(str, problem["loc"])), plain_message(problem)
        mistakes.append(f"{field}: {message}" if field else message)
    return mistakes


def _own_problems(error: ValidationError) -> list[Any]:
    """Problems without those that only echo a deeper one (a list counts as too short when an item of it is wrong)."""
    problems = error.errors()
    places = [problem["loc"] for problem in problems]
    return [p for p in problems if not any(len(q) > len(p["loc"]) and q[: len(p["loc"])] == p["loc"] for q in places)]


def _explain(problem: Any, root: type[BaseModel], line_of: Callable[[Place], str]) -> str:
    field = _Field(root, [part for part in problem["loc"] if not str(part).startswith("function-")])
    kind = ("kind",) if problem["type"] == "union_tag_invalid" else ()
    place = (*field.place, *kind)
    if not place:
        return plain_message(problem)
    message = field.no_such_field() if problem["type"] == "extra_forbidden" else plain_message(problem)
    given = "" if problem["type"] in _SAY_WHAT_IS_GIVEN else f" (given: {problem['input']!r})"
    line = line_of(place)
    return f"{line}: {_dotted(place)}: {message}{given}" if line else f"{_dotted(place)}: {message}{given}"


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def plain_message(problem: Any) -> str:
    """What is wrong, without the field; in words of our own where pydantic speaks of parsing, tuples and instances."""
    kind, about = problem["type"], problem.get("ctx", {})
    if kind == "union_tag_invalid":
        return _none_of(about["tag"], about["expected_tags"])
    if kind == "literal_error":
        return _none_of(problem["input"], about["expected"])
    if kind in _PLAIN:
        return _PLAIN[kind].format(**about)
    return str(problem["msg"]).removeprefix("Value error, ")


def _none_of(given: Any, expected: str) -> str:
    """That a value is none of those that are allowed, which pydantic lists as `'a', 'b' or 'c'`."""
    near = similar(str(given), re.findall("'([^']*)'", expected), 0.6)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{given!r} is none of {expected.replace(' or ', ', ')}{hint}"


class _Field:
    """A field at a place in the configuration.

    Args:
        root: Class of the whole configuration.
        location: As pydantic has it: behind the name of a field with a choice of kinds comes the kind.

    Attributes:
        place: Where it is, without kinds.
        model: Class of which the last one is a field; None where there is none.
    """

    def __init__(self, root: type[BaseModel], location: Sequence[str | int]) -> None:
        self.place: Place = ()
        self._root = root
        self.model: type[BaseModel] | None = root
        self._kinds: Mapping[str, type[BaseModel]] = {}
        kinds: Mapping[str, type[BaseModel]] = {}
        for number, part in enumerate(location):
            if part in kinds:
                self._kinds, self.model, kinds = kinds, kinds[str(part)], {}
                continue
            self.place = (*self.place, part)
            if isinstance(part, str) and number < len(location) - 1:
                self.model, kinds = _inside(self.model, part)

    def no_such_field(self) -> str:
        """Why the last name is not taken, and what to write instead."""
        name = str(self.place[-1])
        kind = next((kind for kind, model in self._kinds.items() if model is self.model), "")
        if others := [other for other, model in self._kinds.items() if name in model.model_fields]:
            return f"{kind} has no such field; {' and '.join(others)} {'have' if len(others) > 1 else 'has'}"
        fields = {} if self.model is None else self.model.model_fields
        here = [field.alias or key for key, field in fields.items()]
        if not similar(name, here, _MISSPELLED) and (others := self._elsewhere(name)):
            return f"there is no such field; did you mean {' or '.join(map(repr, others))}?"
        return f"there is no such field{nearest(name, here)}"

    def _elsewhere(self, name: str) -> list[str]:
        """Where in the whole configuration a name is a field, the nearest places first; also if it is misspelled."""
        places = [field.split(".") for field in dict.fromkeys(all_fields(self._root))]
        names = {place[-1] for place in places}
        meant = name if name in names else similar(name, names, _MISSPELLED)
        here = [str(part) for part in self.place]

        def distance(place: list[str]) -> tuple[int, int]:
            common = next((n for n, (a, b) in enumerate(zip(place, here, strict=False)) if a != b), len(here))
            return -common, len(place)

        alike = [place for place in places if place[-1] == meant]
        best = min(map(distance, alike), default=None)
        return [".".join(place) for place in alike if distance(place) == best][:_PROPOSED]


def all_fields(model: type[BaseModel], place: str = "", outer: tuple[type[BaseModel], ...] = ()) -> Iterator[str]:
    """All fields of a model and below it, of every kind where there is a choice, as dotted names.

    The first item stands for those of a list, as in `data.sources.0.path`.
    """
    for name, field in model.model_fields.items():
        here = f"{place}{field.alias or name}"
        yield here
        choice = choice_of(field)
        below = list(choice.kinds.values()) if choice else list(_models_in(field.annotation))
        item = ".0" if get_origin(field.annotation) in (list, tuple) else ""
        for inner in below:
            if inner not in (model, *outer):
                yield from all_fields(inner, f"{here}{item}.", (model, *outer))


def _inside(model: type[BaseModel] | None, name: str) -> tuple[type[BaseModel] | None, Mapping[str, type[BaseModel]]]:
    """The class of a field's value, and the classes by kind where there is a choice."""
    fields = {} if model is None else {(field.alias or key): field for key, field in model.model_fields.items()}
    if name not in fields:
        return None, {}
    choice = choice_of(fields[name])
    return next(_models_in(fields[name].annotation), None), choice.kinds if choice else {}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models_in(part)
