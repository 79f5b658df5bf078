"""The end of a flow's process: within ten seconds of being told to, and not because its worker has died."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

END_S = 9.7
"""A training that is asked to end has half a second less, for a last checkpoint."""
_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def bounded_end(patience_s: float = END_S) -> Iterator[None]:
    """End this process hard, with all that it started, when it is still there a while after SIGTERM.

    Prefect turns the signal into an exception, which waits for threads in the middle of a piece of work; a worker that
    cancels a run would kill the process after half a minute, but not what that has started.

    Args:
        patience_s: Seconds that it has to end by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before: Any = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        last = threading.Timer(patience_s, end_hard)
        last.daemon = True
        last.start()
        if callable(before):
            before(number, frame)
        else:
            raise SystemExit(_TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)


def end_hard() -> None:
    """Kill what this process has started, and end it."""
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os._exit(_TERMINATED)


def descendants(root: int) -> list[int]:
    """Numbers of the processes below one, as far as the system tells."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def outlive_reader() -> None:
    """Go on when nobody reads this process's output any more, as when its worker has been killed.

    Prefect's console handler would end the process at its next line, and with it a training of days.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", ())}:
        console = getattr(handler, "console", None)
        if isinstance(console, Console):
            console.on_broken_pipe = partial(_fall_silent, console)  # type: ignore[method-assign]


def _fall_silent(console: Console) -> None:
    console.quiet = True
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, console.file.fileno())
    os.close(nobody)
