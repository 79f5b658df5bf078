"""Ctrl-C while the `starling` command still imports its libraries, which takes seconds: one line, no traceback."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

_PROGRAMS = ("starling", "-m")
"""What `sys.argv[0]` says while this package is imported by the console script, and by `python -m flows.cli.app`."""


def is_command() -> bool:
    """Whether this process is the command, while it imports."""
    return Path(sys.argv[0]).name in _PROGRAMS and multiprocessing.parent_process() is None


def hear_interrupts() -> None:
    """Until `imported` is called, let Ctrl-C end this process at once, if it is the command and handles none itself."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def imported() -> None:
    """Leave Ctrl-C to the command from now on."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, _: object) -> None:
    # nothing has been started or opened yet; an exception could be swallowed by the module that is being imported
    os.write(sys.stderr.fileno(), b"interrupted (Ctrl-C)\n")
    os._exit(128 + number)
