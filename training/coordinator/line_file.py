"""Files that lines are appended to, each written whole or not at all, also where a disk is full or a writer is killed.

A write to a full disk may take a part of what it is given, without an error. The half line is cut off again, so that
the next one does not join it.
"""

import os
from contextlib import suppress
from pathlib import Path

_PORTION = 1 << 16


class LineFile:
    """Appends whole lines to a file that nobody else writes to.

    Args:
        path: The file; what a killed writer has left of a line is cut off.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.trouble: OSError | None = None
        """Why the last append did not take everything."""
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
        """Bytes of the file, without what could not be cut off yet."""
        return os.fstat(self._fd).st_size if self._torn is None else self._torn

    def append(self, lines: bytes) -> int:
        """Append lines, as many as the disk takes whole.

        Args:
            lines: Each with its line feed.

        Returns:
            Bytes that were appended; where it is not all of them, `trouble` says why.
        """
        self.trouble = None
        done = 0
        try:
            self._cut()
            before = self._torn = self.size
            while done < len(lines):
                # after a short write the next one succeeds, or says what is wrong
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
        """Cut off half a line that a failed append has left."""
        if self._torn is not None:
            os.ftruncate(self._fd, self._torn)
            self._torn = None

    def read(self, offset: int, limit: int) -> bytes:
        """Bytes from an offset, as many as there are up to the limit."""
        return os.pread(self._fd, max(0, min(limit, self.size - offset)), offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _whole_bytes(fd: int) -> int:
    """Bytes of a file up to its last line feed."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - _PORTION)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
