"""Standard output that is not read any more, or cannot be written: a clear end instead of a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

PIPE_CLOSED = 128 + 13
"""Exit status of a program that a closed pipe ends (SIGPIPE), as of `yes | head`."""


class OutputError(RuntimeError):
    """Standard output cannot be written."""


class _Output:
    """Standard output whose failures end the command: silently where the reader has left, else with an `OutputError`.

    They are caught here since a BrokenPipeError that reaches the command may as well come from a server.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        with self._ending():
            return self._stream.write(text)

    def flush(self) -> None:
        """Write what waits."""
        with self._ending():
            self._stream.flush()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._discard()
            raise SystemExit(PIPE_CLOSED) from None
        except OSError as error:
            self._discard()
            raise OutputError(
                f"standard output cannot be written ({error.strerror or error}): free some space where it goes, or "
                "send it elsewhere. What the command had to do before is done and kept"
            ) from None

    def _discard(self) -> None:
        """Let what waits go nowhere: the interpreter writes it when it ends."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextmanager
def guarded_output() -> Iterator[None]:
    """Run a command with such a standard output.

    Raises:
        SystemExit: Its output cannot be written: status 141 if the reader has left, else 1.
    """
    if sys.stdout is None:  # closed by the caller
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    sys.stdout = output = cast(TextIO, _Output(sys.stdout))
    try:
        try:
            yield
        finally:
            output.flush()
    except OutputError as error:
        sys.stderr.write(f"error OutputError: {error}\n")
        raise SystemExit(1) from None
