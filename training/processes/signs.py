"""Signs of life of a process that nobody else hears of while it computes: the time of a file in a shared folder."""

import time
from contextlib import suppress
from pathlib import Path

_NAME = "computing"
_EVERY_S = 5.0


class Signs:
    """Gives signs, one every few seconds at most.

    Args:
        folder: Where the other process looks for them.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._next = folder / _NAME, 0.0

    def give(self, *_: object) -> None:
        """Give a sign, also as a hook of torch's modules; a full disk is no reason to end."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _EVERY_S
        with suppress(OSError):
            self._path.touch()


def last_sign(folder: Path) -> int:
    """A number that changes with each sign; 0 before the first."""
    try:
        return (folder / _NAME).stat().st_mtime_ns
    except OSError:
        return 0
