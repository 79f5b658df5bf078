"""The end of the `starling` command: its status is what the command says, independent of how the interpreter ends."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

from training.processes import exit_at_once

_statuses: list[int] = []


def leave_last() -> None:
    """Have the process end after all exit handlers that are registered from now on, as soon as its status is known."""
    atexit.register(_leave)


@contextmanager
def leaving() -> Iterator[None]:
    """Run a command, whose status is the process's."""
    try:
        yield
    except SystemExit as end:
        _statuses.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    _statuses.append(0)


def _leave() -> None:
    if _statuses:  # else it is an error, or another program
        exit_at_once(_statuses[-1])
