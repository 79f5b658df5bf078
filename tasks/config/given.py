"""What a configuration gives, as opposed to its defaults, and where: a line of its file, or `--set`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tasks.config.assignments import assigned

SET = "--set"
_MERGE = "<<"
Place = tuple[str | int, ...]
"""Names of fields and numbers of list items on the way to a value."""


@dataclass(frozen=True)
class Given:
    """Origins, `FILE:LINE` or `--set`, by place.

    Attributes:
        values: Of all values, lists and empty mappings included.
        sections: Of mappings that are not empty.
    """

    values: dict[Place, str]
    sections: dict[Place, str]

    def line(self, place: Place) -> str:
        """`FILE:LINE` of a value or section, or of the nearest one around it; empty if `--set` gives it."""
        for length in range(len(place), -1, -1):
            at = place[:length]
            if origin := self.values.get(at) or self.sections.get(at):
                return "" if origin == SET else origin
        return ""


def find_given(text: str, name: str, overrides: Sequence[str]) -> Given:
    """Where everything stands that a document and assignments give; both must be well-formed.

    Args:
        text: The YAML document.
        name: The file's name, for the origins.
        overrides: Assignments of `--set`.
    """
    given = Given({}, {})
    for place, line, section in _nodes(yaml.compose(text, Loader=yaml.SafeLoader), (), 1):
        (given.sections if section else given.values).setdefault(place, f"{name}:{line}")
    for override in overrides:
        field, _, value = override.partition("=")
        at: Place = tuple(int(part) if part.isdigit() else part for part in field.strip().split("."))
        for origins in (given.values, given.sections):
            for below in [place for place in origins if place[: len(at)] == at]:
                del origins[below]
        for length in range(1, len(at)):  # sections that the assignment makes on its way
            if at[:length] not in given.values:
                given.sections.setdefault(at[:length], SET)
        for place, section in _parts(assigned(value), at):
            (given.sections if section else given.values)[place] = SET
    return given


def _nodes(node: yaml.Node | None, at: Place, line: int) -> Iterator[tuple[Place, int, bool]]:
    """Places of a document's parts with the lines of their names, and whether each is a section; merged ones come last.

    Args:
        node: A part of the document.
        at: Its place.
        line: Its line.
    """
    if isinstance(node, yaml.MappingNode) and node.value:
        yield at, line, True
        merged = [value for key, value in node.value if key.value == _MERGE]
        for key, value in node.value:
            if key.value != _MERGE:
                yield from _nodes(value, (*at, key.value), key.start_mark.line + 1)
        for value in merged:
            for item in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _nodes(item, at, line)
    elif node is not None:
        yield at, line, False
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                yield from _nodes(item, (*at, number), item.start_mark.line + 1)


def _parts(value: Any, at: Place) -> Iterator[tuple[Place, bool]]:
    """Places of the parts of an assigned value, and whether each is a section."""
    section = isinstance(value, dict) and bool(value)
    yield at, section
    items = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for name, item in items:
        yield from _parts(item, (*at, name))
