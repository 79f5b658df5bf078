"""The readers' contract suite, for the tests beside it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.register_assert_rewrite("corpus_contract")


def _load(name: str) -> ModuleType:
    """A module beside this one: tests/ is not on sys.path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_load("corpus_contract")
