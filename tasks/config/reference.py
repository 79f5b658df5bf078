"""Reference of the configuration in Markdown: every field with its type, default and meaning, taken from the classes.

`starling config reference` prints it; docs/reference.md is its output (`make tables`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configurable.choices import Choice, OneOf, choice_of
from configurable.configuration import descriptions
from tasks.config.yaml_text import one_line

_HEAD = """\
# Configuration reference

Every field of a configuration, with its type, its default and its meaning. Written by `starling config reference`;
[configurations](configuration.md) explains how they are used. `starling config show CONFIG` prints all fields of a
configuration with their values and where each came from, and `starling config check CONFIG` looks for mistakes.

A field that takes one of several kinds is written as a mapping with `kind` (`model: {kind: blstm, layers: 4}`), or as
the kind's name alone (`model: blstm`).
"""
_PLAIN = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any value", NoneType: "nothing"}
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def reference(root: type[BaseModel]) -> str:
    """The reference of a configuration class."""
    return _Reference().page(root)


class _Reference:
    """Writes each class once; later fields of the same class refer to its first place."""

    def __init__(self) -> None:
        self._places: dict[object, str] = {}

    def page(self, root: type[BaseModel]) -> str:
        parts = [_HEAD, "## Top level\n", _table(_fields(root))]
        for name, field in _fields(root).items():
            if _is_section(field):
                parts += self._section(name, field, 2)
        return "\n".join(parts)

    def _section(self, place: str, field: FieldInfo, level: int, of: str = "") -> Iterator[str]:
        """The parts of a field that holds other fields; `of` names the kinds in which it is another field."""
        title = f"{'#' * min(level, 4)} `{place}`{of}\n"
        choice = choice_of(field) or _choice_of_items(field.annotation)
        what: Any = frozenset(choice.kinds.items()) if choice else _model_of(field.annotation)
        yield title
        yield _introduction(field)
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        if (known := self._known(what)) is not None:
            given = f", with the defaults `{_flow(changed)}`" if (changed := _changed(value)) else ""
            yield f"Fields as of `{known}`{given}.\n"
            return
        self._places[what] = place
        if choice:
            yield from self._kinds(place, choice.kinds, level)
        else:
            yield from self._model(place, what, value if isinstance(value, BaseModel) else None, level)

    def _known(self, what: Any) -> str | None:
        """The place that has described a class, or a choice with at least these kinds."""
        for described, place in self._places.items():
            if what == described or (
                isinstance(what, frozenset) and isinstance(described, frozenset) and what < described
            ):
                return place
        return None

    def _model(self, place: str, model: type[BaseModel], defaults: BaseModel | None, level: int) -> Iterator[str]:
        yield _table(_fields(model), defaults)
        for name, field in _fields(model).items():
            if _is_section(field):
                yield from self._section(f"{place}.{name}", field, level + 1)

    def _kinds(self, place: str, kinds: Mapping[str, type[Choice]], level: int) -> Iterator[str]:
        """Fields that several kinds have in common, then those of one kind."""
        own = {kind: {n: f for n, f in _fields(model).items() if n != "kind"} for kind, model in kinds.items()}
        sharing: dict[str, list[str]] = {}
        for kind, fields in own.items():
            for name, field in fields.items():
                sharing.setdefault(_row(name, field), []).append(kind)
        groups: dict[tuple[str, ...], list[str]] = {}
        for row, those in sharing.items():
            groups.setdefault(tuple(those), []).append(row)
        for some, rows in sorted(groups.items(), key=lambda group: -len(group[0])):
            if len(some) > 1:
                yield f"Fields of {_of_kinds(some, list(kinds))}:\n"
                yield _table_of(rows)
        for kind, model in kinds.items():
            yield f"**`kind: {kind}`**: {summary(model)}\n"
            if (kind,) in groups:
                yield _table_of(groups[kind,])
        sections: dict[str, dict[object, list[str]]] = {}  # a field may have other classes in other kinds
        for kind, fields in own.items():
            for name, field in fields.items():
                if _is_section(field):
                    sections.setdefault(name, {}).setdefault(field.annotation, []).append(kind)
        for name, classes in sections.items():
            for those in classes.values():
                of = f" of {_of_kinds(tuple(those), list(kinds))}" if len(classes) > 1 else ""
                yield from self._section(f"{place}.{name}", own[those[0]][name], level + 1, of)


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a class with their descriptions."""
    fields = {name: copy(field) for name, field in model.model_fields.items()}
    for name, text in descriptions(model).items():
        fields[name].description = text
    return {field.alias or name: field for name, field in fields.items()}


def _is_section(field: FieldInfo) -> bool:
    return choice_of(field) is not None or _model_of(field.annotation) is not None


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The class of a field's value or of the items of its list, if it is a class with fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_of(part))), None)


def _choice_of_items(annotation: Any) -> OneOf | None:
    """The choice that the items of a list are, if they are."""
    if get_origin(annotation) is Annotated:
        return next((part for part in get_args(annotation) if isinstance(part, OneOf)), None)
    return next((choice for part in get_args(annotation) if (choice := _choice_of_items(part))), None)


def summary(model: type[BaseModel]) -> str:
    """First paragraph of a class's docstring."""
    return " ".join((model.__doc__ or "").strip().split("\n\n")[0].split())


def _introduction(field: FieldInfo) -> str:
    return f"{_one_line(field.description or '')}\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _table(fields: Mapping[str, FieldInfo], defaults: BaseModel | None = None) -> str:
    """A table of fields; with defaults, these instead of the classes' own."""
    return _table_of([_row(name, field, defaults) for name, field in fields.items()])


def _of_kinds(some: Sequence[str], kinds: Sequence[str]) -> str:
    """Some of the kinds in words."""
    if len(some) == len(kinds):
        return "every kind"
    others = [kind for kind in kinds if kind not in some]
    if len(others) == 1:
        return f"every kind but `{others[0]}`"
    return ", ".join(f"`{kind}`" for kind in some)


def _table_of(rows: Sequence[str]) -> str:
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(name: str, field: FieldInfo, defaults: BaseModel | None = None) -> str:
    cells = (f"`{name}`", _type(field), _default(name, field, defaults), _one_line(field.description or ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(field: FieldInfo) -> str:
    if (choice := choice_of(field)) is not None:
        kinds = "one of the kinds " + ", ".join(f"`{kind}`" for kind in choice.kinds)
        return kinds + (", or nothing" if choice.optional else "")
    if isinstance(field.json_schema_extra, dict) and isinstance(named := field.json_schema_extra.get("enum"), list):
        return ", ".join(f"`{value}`" for value in named)
    bounds = [
        f"{sign} {value:g}"
        for name, sign in _BOUNDS
        for rule in field.metadata
        if isinstance(value := getattr(rule, name, None), int | float)
    ]
    return _words(field.annotation) + (f" {', '.join(bounds)}" if bounds else "")


def _words(annotation: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin is Annotated:
        return _words(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(_words(part) for part in parts)
    if origin in (tuple, list):
        items = [part for part in parts if part is not Ellipsis]
        of = " and ".join(dict.fromkeys(_words(part) for part in items)).replace("section", "sections")
        return f"list of {of}" if Ellipsis in parts or origin is list else f"list of {len(items)}: {of}"
    if origin is dict:
        return f"mapping to {_words(parts[1])}"
    return "section"


def _default(name: str, field: FieldInfo, defaults: BaseModel | None) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, name)
    if isinstance(value, BaseModel):
        plain = f"`{value.kind}`" if isinstance(value, Choice) else "as of its fields"
        return f"`{_flow(changed)}`" if (changed := _changed(value)) else plain
    return "nothing" if value is None else f"`{_flow(value)}`"


def _given(section: BaseModel) -> dict[str, Any]:
    """Fields of a section that differ from the defaults of its class, and the kind of one of several kinds."""
    return section.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _changed(value: Any) -> dict[str, Any]:
    """Fields of a section that differ from the defaults of its class; for one of several kinds also the kind."""
    given = _given(value) if isinstance(value, BaseModel) else {}
    return given if given.keys() - {"kind"} else {}


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    return one_line(json.loads(json.dumps(value, default=_given, sort_keys=True)))  # tuples become lists
