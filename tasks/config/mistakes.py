"""Mistakes in a configuration: one line each, with the field, what is wrong, and what to write instead."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from configurable.choices import choice_of
from tasks.dataset.sources import nearest
from training.strategies.registry import STRATEGY_CONFIGS

MOVED = {
    **{f"train.{kind}": f"train.strategy: {{kind: {kind}, ...}}" for kind in STRATEGY_CONFIGS},
    **{f"train.exchange.{name}": f"train.strategy.{name}" for name in ("neighbours", "per_step", "newcomer")},
    **{f"train.membership.store_{name}_s": f"train.membership.coordinator_{name}_s" for name in ("grace", "patience")},
}
"""Fields of earlier versions, and what is written today."""


def choices(model: type[BaseModel], place: str = "") -> Iterator[str]:
    """Fields below a model that take one of several kinds, as dotted names."""
    for name, field in model.model_fields.items():
        here = f"{place}{field.alias or name}"
        if choice_of(field):
            yield here
        for below in _models_in(field.annotation):
            yield from choices(below, f"{here}.")


def explained(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """A line for each mistake.

    Args:
        error: What pydantic found.
        root: Class of the whole configuration.
    """
    return [_explain(problem, root) for problem in _own_problems(error)]


def plainly(error: ValidationError) -> list[str]:
    """A line for each mistake, with the field by its name in the class that was checked."""
    found = []
    for problem in _own_problems(error):
        field, message = ".".join(map(str, problem["loc"])), str(problem["msg"]).removeprefix("Value error, ")
        found.append(f"{field}: {message}" if field else message)
    return found


def _own_problems(error: ValidationError) -> list[Any]:
    """Problems without those that only echo a deeper one (a list counts as too short when an item of it is wrong)."""
    problems = error.errors()
    places = [problem["loc"] for problem in problems]
    return [p for p in problems if not any(len(q) > len(p["loc"]) and q[: len(p["loc"])] == p["loc"] for q in places)]


def _explain(problem: Any, root: type[BaseModel]) -> str:
    place = _Place(root, [part for part in problem["loc"] if not str(part).startswith("function-")])
    field = ".".join(place.names)
    if problem["type"] == "extra_forbidden":
        return f"{field}: {place.no_such_field()}"
    if problem["type"] == "missing":
        return f"{field}: this field is required"
    if problem["type"] == "union_tag_invalid":
        tag, kinds = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'", "").split(", ")
        hint = next((f", did you mean {kind!r}?" for kind in get_close_matches(tag, kinds, 1)), "")
        return f"{field}.kind: {tag!r} is none of {', '.join(map(repr, kinds))}{hint}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    given = "" if problem["type"] == "value_error" else f" (given: {problem['input']!r})"
    return f"{field}: {message}{given}" if field else message


class _Place:
    """A place in the configuration.

    Args:
        root: Class of the whole configuration.
        location: As pydantic has it: behind the name of a field with a choice of kinds comes the kind.

    Attributes:
        names: Of the fields on the way, without kinds.
        model: Class of which the last one is a field; None where there is none.
    """

    def __init__(self, root: type[BaseModel], location: Sequence[str | int]) -> None:
        self.names: list[str] = []
        self.model: type[BaseModel] | None = root
        self._kinds: Mapping[str, type[BaseModel]] = {}
        kinds: Mapping[str, type[BaseModel]] = {}
        for number, part in enumerate(location):
            if part in kinds:
                self._kinds, self.model, kinds = kinds, kinds[str(part)], {}
                continue
            self.names.append(str(part))
            if isinstance(part, str) and number < len(location) - 1:
                self.model, kinds = _inside(self.model, part)

    def no_such_field(self) -> str:
        """Why the last name is not taken, and what to write instead."""
        name, field = self.names[-1], ".".join(self.names)
        if field in MOVED:
            return f"this field has moved: write {MOVED[field]}"
        kind = next((kind for kind, model in self._kinds.items() if model is self.model), "")
        if others := [other for other, model in self._kinds.items() if name in model.model_fields]:
            return f"{kind} has no such field; {' and '.join(others)} {'have' if len(others) > 1 else 'has'}"
        fields = {} if self.model is None else self.model.model_fields
        return f"there is no such field{nearest(name, [f.alias or one for one, f in fields.items()])}"


def _inside(model: type[BaseModel] | None, name: str) -> tuple[type[BaseModel] | None, Mapping[str, type[BaseModel]]]:
    """The class of a field's value, and the classes by kind where there is a choice."""
    fields = {} if model is None else {(f.alias or one): f for one, f in model.model_fields.items()}
    if name not in fields:
        return None, {}
    choice = choice_of(fields[name])
    return next(_models_in(fields[name].annotation), None), choice.kinds if choice else {}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models_in(part)
