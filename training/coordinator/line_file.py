"""Files to which lines are appended whole or not at all, even if the disk is full or the writer is killed.

A write to a full disk may write only a part, without an error. The incomplete line is truncated, so that the next one
does not continue it.
"""

import os
from contextlib import suppress
from pathlib import Path

_PORTION = 1 << 16


class LineFile:
    """Appends whole lines to a file that has no other writer.

    Args:
        path: The file; an incomplete line that a killed writer left is truncated.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.trouble: OSError | None = None
        """Why the last append was incomplete; None if it was complete."""
        self._torn: int | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if (whole := _whole_bytes(self._fd)) < os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, whole)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def size(self) -> int:
        """Bytes of the file, without an incomplete line that could not be truncated yet."""
        return os.fstat(self._fd).st_size if self._torn is None else self._torn

    def append(self, lines: bytes) -> int:
        """Append as many whole lines as the disk accepts.

        Args:
            lines: The lines, each with its line feed.

        Returns:
            Bytes appended; if these are not all, `trouble` says why.
        """
        self.trouble = None
        done = 0
        try:
            self._cut()
            before = self._torn = self.size
            while done < len(lines):
                # after a short write, the next write succeeds or raises the reason
                done += os.write(self._fd, lines[done:])
                self._torn = before + lines.rfind(b"\n", 0, done) + 1
            self._torn = None
        except OSError as error:
            self.trouble = error
        done = lines.rfind(b"\n", 0, done) + 1
        with suppress(OSError):  # the next append tries again
            self._cut()
        return done

    def _cut(self) -> None:
        """Truncate an incomplete line that a failed append left."""
        if self._torn is not None:
            os.ftruncate(self._fd, self._torn)
            self._torn = None

    def read(self, offset: int, limit: int) -> bytes:
        """Read up to `limit` bytes from an offset."""
        return os.pread(self._fd, max(0, min(limit, self.size - offset)), offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _whole_bytes(fd: int) -> int:
    """Number of bytes up to and including the last line feed."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - _PORTION)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
