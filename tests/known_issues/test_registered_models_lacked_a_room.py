"""Registered models could not be loaded without Starling: `storage`, which `recognition` imports, was not with them."""

import ast
from pathlib import Path

from tasks.stages import register

ROOMS = {Path(str(room.__file__)).parent for room in register._ROOMS}
ALL = {path.parent.name for path in next(iter(ROOMS)).parent.glob("*/__init__.py")}


def imported(file):
    """Top-level names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def test_what_is_stored_with_a_model_imports_no_other_room():
    stored = {room.name for room in ROOMS}
    assert {"recognition", "storage", "tasks"} <= ALL
    needed = {name for room in ROOMS for file in room.rglob("*.py") for name in imported(file)} & ALL
    assert needed == stored
