"""The base of all configurations, which starts quickly: a command defines some 150 of these classes and uses a few."""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class Configuration(BaseModel):
    """A configuration: its fields cannot be changed, others are refused, and the docstring of a field describes it.

    A class is built when it is first used, and docstrings are read when they are shown. Pydantic would do both when a
    class is defined, which takes 0.4 s of CPU for those of a pipeline.
    """

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=(), defer_build=True
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With the descriptions of the fields."""
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).get("properties", {})
        for name, text in descriptions(cls).items():
            properties.get(cls.model_fields[name].alias or name, {}).setdefault("description", text)
        return described


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Docstrings of the fields of a model; a field without one has that of the class that it is inherited from.

    Args:
        model: The class.
    """
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel):
            texts |= _docstrings(base.__module__).get(base.__qualname__, {})
    return {name: texts[name] for name in model.model_fields if name in texts}


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Docstrings of the attributes of a module's classes, by the classes' qualified names."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # without source code, as in an interactive session
        return {}
    return dict(_documented(ast.parse(source), ""))


def _documented(scope: ast.AST, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the classes of a scope, and of the scopes within it, with the docstrings of their attributes."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", dict(_attributes(node))
            yield from _documented(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield from _documented(node, f"{prefix}{node.name}.<locals>.")


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the annotated attributes of a class that a docstring follows."""
    for attribute, following in pairwise(node.body):
        match attribute, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
