"""What the address of a stage's output holds of a configuration: the fields that differ from their defaults.

A field that a later version adds has its default in every existing configuration, so it changes no address and nothing
is made again. A default that changes gives another output at the same address: raise the stage's version then.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from configurable.choices import Choice

_ALWAYS = object()
"""Instead of the default of a field that is always there."""
_JSON = frozenset((str, int, float, bool, type(None)))


def address_content(
    config: BaseModel, *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> dict[str, Any]:
    """What an address holds of a configuration, as JSON: its fields without those that equal their defaults.

    Required fields and the `kind` of a choice are always there: without the kind, the other fields mean nothing. A part
    is compared with what the field's default is, which may be another one than its class has.

    Args:
        config: The configuration.
        only: The fields that affect the output; by default all.
        without: Fields that do not affect it. A dot leads to a field of a part, or of the elements of a list:
            `exchange.encrypt`, `sources.licence`.
    """
    content: dict[str, Any] = {}
    for name, inner, default in _contents(type(config), None if only is None else frozenset(only), frozenset(without)):
        value = _plain(getattr(config, name), inner)
        if default is _ALWAYS or value != default:
            content[name] = value
    return content


@functools.cache
def _contents(
    cls: type[BaseModel], only: frozenset[str] | None, without: frozenset[str]
) -> tuple[tuple[str, frozenset[str], Any], ...]:
    """The fields of a class that an address may hold: name, what to leave out of the value, and the default as JSON."""
    fields = []
    for name, field in cls.model_fields.items():
        if name in without or (only is not None and name not in only):
            continue
        inner = frozenset(path.removeprefix(f"{name}.") for path in without if path.startswith(f"{name}."))
        kind = name == "kind" if issubclass(cls, Choice) else _is_discriminator(field)
        always = field.is_required() or kind
        fields.append((name, inner, _ALWAYS if always else _plain(field.get_default(call_default_factory=True), inner)))
    return tuple(fields)


def _is_discriminator(field: FieldInfo) -> bool:
    """Whether the field has a single possible value, and so tells its class from the others of a union."""
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def _plain(value: Any, without: frozenset[str]) -> Any:
    if type(value) in _JSON:
        return value
    if isinstance(value, BaseModel):
        return address_content(value, without=without)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, without) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, without) for item in value]
    return to_jsonable_python(value)
