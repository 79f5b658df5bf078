"""A closed pipe or a full disk at standard output ends a command with a clear message instead of a traceback."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

PIPE_CLOSED = 128 + 13
"""Exit status of a program ended by a closed pipe (SIGPIPE), such as `yes` in `yes | head`."""


class OutputError(RuntimeError):
    """Standard output cannot be written."""


class _Output:
    """Standard output whose failures end the command: silently if the pipe is closed, else with an `OutputError`.

    Failures are caught here because a BrokenPipeError in a command may come from a server connection as well.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text."""
        with self._ending():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush the buffer."""
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
                f"standard output cannot be written ({error.strerror or error}): free some space there, or redirect "
                "it elsewhere. The work that the command finished before is kept"
            ) from None

    def _discard(self) -> None:
        """Discard the buffer: the interpreter would write it at exit."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextmanager
def guarded_output() -> Iterator[None]:
    """Run a command with guarded standard output.

    Raises:
        SystemExit: If the output cannot be written: status 141 if the pipe is closed, else 1.
    """
    if sys.stdout is None:  # closed by the caller
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may be no text in the terminal's encoding
            with suppress(OSError):  # the descriptor is now of another kind of file: what is printed is checked anyway
                stream.reconfigure(errors="backslashreplace")
    sys.stdout = output = cast(TextIO, _Output(sys.stdout))
    try:
        try:
            yield
        finally:
            output.flush()
    except OutputError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
