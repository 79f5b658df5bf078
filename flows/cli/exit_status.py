"""Exit status of the `starling` command, independent of what happens in the interpreter's shutdown."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

from training.processes.children import exit_at_once

_statuses: list[int] = []


def leave_last() -> None:
    """Register an exit handler that ends the process with its status; it runs after all handlers registered later."""
    atexit.register(_leave)


@contextmanager
def leaving() -> Iterator[None]:
    """Record the command's exit status for the exit handler."""
    try:
        yield
    except SystemExit as end:
        _statuses.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    _statuses.append(0)


def _leave() -> None:
    if _statuses:  # empty after an uncaught error, and in other programs
        exit_at_once(_statuses[-1])
