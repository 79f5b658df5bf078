"""Configurations of components of which one is chosen: every kind has its own class, with its own fields.

A registry maps kinds to classes; a field annotated with `OneOf(registry, default)` takes a mapping with a `kind`, or
the name alone:

    model: {kind: conformer, layers: 4}
    model: blstm
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from configurable.configuration import Configuration


class Choice(Configuration):
    """Configuration of one kind of component; a subclass has a literal `kind`."""

    kind: str = ""
    """Which component it is."""

    @model_serializer(mode="wrap")
    def _keep_kind(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With the kind even where defaults are left out: the other fields mean nothing without it."""
        return {"kind": self.kind, **serialize(self)}


class ChoiceWithFiles(Choice):
    """A choice whose kinds may name files.

    Attributes:
        file_fields: Fields that name files, each with the file's stem where the files are kept together. A dot leads to
            a field of a part.
    """

    file_fields: ClassVar[dict[str, str]] = {}

    def files(self) -> dict[str, str]:
        """Paths of the files that are named, by field."""
        return {name: path for name in self.file_fields if (path := attrgetter(name)(self))}

    def with_files(self, change: Callable[[str], str]) -> Self:
        """This configuration with other paths of files."""
        made = self
        for name, path in self.files().items():
            made = _replaced(made, name, change(path))
        return made


M = TypeVar("M", bound=BaseModel)


def _replaced(model: M, field: str, value: Any) -> M:
    """A model with another value of a field; a dot leads to a field of a part."""
    name, _, rest = field.partition(".")
    return model.model_copy(update={name: _replaced(getattr(model, name), rest, value) if rest else value})


class OneOf:
    """Annotates a field whose value is one of a registry's choices.

    Args:
        kinds: Kind to class; looked up when a model with such a field is first used.
        default: Kind of a mapping that names none.
        optional: Whether the field may be None: no component at all.
    """

    def __init__(self, kinds: Mapping[str, type[Choice]], default: str, optional: bool = False) -> None:
        self.kinds, self.default, self.optional = kinds, default, optional

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {kind: handler.generate_schema(choice) for kind, choice in self.kinds.items()}
        union: CoreSchema = core_schema.tagged_union_schema(choices, discriminator="kind")
        if self.optional:
            union = core_schema.nullable_schema(union)
        return core_schema.no_info_before_validator_function(self._named, union)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With `anyOf` in place of `oneOf`, which the forms of Prefect's UI do not know."""
        form = handler(schema)
        if self.optional:
            choices, nothing = form["anyOf"]
            return form | {"anyOf": [*choices["oneOf"], nothing]}
        form.pop("discriminator", None)
        form["anyOf"] = form.pop("oneOf")
        return form

    def _named(self, value: Any) -> Any:
        if isinstance(value, str):
            return {"kind": value}
        if isinstance(value, Mapping) and "kind" not in value:
            return {"kind": self.default, **value}
        return value


def choice_of(field: FieldInfo) -> OneOf | None:
    """The choice that a field is annotated with, if it is."""
    return next((note for note in field.metadata if isinstance(note, OneOf)), None)
