"""Fixtures of the command line's tests."""

import pytest
from support import load_beside

load_beside(__file__, "command_line.py")


@pytest.fixture
def wide(monkeypatch):
    """A terminal that does not wrap lines."""
    for console in ("out", "err"):
        monkeypatch.setattr(f"flows.cli.common.{console}.width", 200, raising=False)


@pytest.fixture
def recorder(monkeypatch):
    """Replaces a function by one that records its arguments."""

    def record(name, answer=None):
        calls = []

        def called(*given, **named):
            calls.append((*given, named) if named else given)
            return answer

        monkeypatch.setattr(name, called)
        return calls

    return record
