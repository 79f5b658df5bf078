"""Assignments on the command line: `--set train.optimizer.lr=0.001` changes a field of a configuration."""

from collections.abc import Container, Sequence
from typing import Any

import yaml

from tasks.config.yaml_text import parse_yaml


def assign(document: dict[str, Any], assignments: Sequence[str], choices: Container[str] = ()) -> None:
    """Change a configuration's document in place.

    Args:
        document: As YAML has it.
        assignments: `field.field=value`; values are YAML, list items are reached by number.
        choices: Fields whose value may be the name of a kind alone; below it its fields can be set all the same.

    Raises:
        ValueError: An assignment is malformed, or undoes another one.
    """
    _check_assignments(assignments)
    for assignment in assignments:
        _assign(document, assignment, choices)


def _check_assignments(overrides: Sequence[str]) -> None:
    """Refuse an assignment that an earlier one would be lost by: of the same field, or of one below it."""
    given: dict[str, str] = {}
    for assignment in overrides:
        key = assignment.partition("=")[0].strip()
        for earlier, text in given.items():
            if earlier == key:
                raise ValueError(f"--set {text!r} and --set {assignment!r} set the same field: keep one of them")
            if earlier.startswith(f"{key}."):
                raise ValueError(
                    f"--set {assignment!r} would undo --set {text!r}: put the one of {key} before that of {earlier}"
                )
        given[key] = assignment


def _assign(document: dict[str, Any], assignment: str, choices: Container[str]) -> None:
    key, sign, text = assignment.partition("=")
    if not sign or not key:
        raise ValueError(f"--set {assignment!r}: write field=value, for example train.optimizer.lr=0.001")
    try:
        value = assigned(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {assignment!r}: {text!r} is not a YAML value; quote it if it is text") from error
    try:
        assign_value(document, key.strip(), value, choices)
    except ValueError as error:
        raise ValueError(f"--set {assignment!r}: {error}") from error


def assigned(text: str) -> Any:
    """The value that an assignment gives.

    Args:
        text: What follows its equals sign.

    Raises:
        YAMLError: It is not a YAML value.
    """
    return text if text.startswith("@") else parse_yaml(text)  # YAML reserves @, and an alias of a model has one


def assign_value(document: dict[str, Any], key: str, value: Any, choices: Container[str] = ()) -> None:
    """Change one field of a configuration's document in place.

    Args:
        document: As YAML has it.
        key: The field, as `field.field`; list items are reached by number.
        value: As YAML has it.
        choices: Fields whose value may be the name of a kind alone.

    Raises:
        ValueError: There can be no such field.
    """
    *parents, last = key.split(".")
    node: Any = document
    for depth, name in enumerate(parents, start=1):
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict):
            if isinstance(node.get(name), str) and ".".join(parents[:depth]) in choices:
                node[name] = {"kind": node[name]}
            node = node.setdefault(name, {})
        else:
            raise ValueError(_no_field(node, parents[: depth - 1], name))
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ValueError(_no_field(node, parents, last))


def _no_field(node: Any, parents: Sequence[str], name: str) -> str:
    """Why a value has no such field."""
    place = ".".join(parents)
    if isinstance(node, list):
        return f"{place} is a list of {len(node)}, whose items are numbered from 0: it has no item {name!r}"
    return f"{place} is {node!r}, which has no field {name!r}"
