"""Ctrl-C while the `starling` command imports its libraries, which takes seconds: one line, no traceback."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

_PROGRAMS = ("starling", "-m")
"""Last part of `sys.argv[0]` during imports by the console script, and by `python -m flows.cli.app`."""
_MAIN = ("starling", "__main__.py")
"""Its last parts during imports by `python -m starling`."""


def is_command() -> bool:
    """Whether this process is the `starling` command; valid during its imports."""
    program = Path(sys.argv[0])
    known = program.name in _PROGRAMS or program.parts[-2:] == _MAIN
    return known and multiprocessing.parent_process() is None


def hear_interrupts() -> None:
    """Make Ctrl-C end the command at once until `imported` is called, unless a handler is installed."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def imported() -> None:
    """Restore the default handling of Ctrl-C after the imports."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, _: object) -> None:
    # nothing is started or open yet; the module being imported could swallow an exception
    os.write(sys.stderr.fileno(), b"interrupted (Ctrl-C)\n")
    os._exit(128 + number)
