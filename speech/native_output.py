"""Console output of compiled libraries, which bypass `sys.stderr` and write to file descriptor 2."""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()


@contextmanager
def without_lines(prefixes: tuple[bytes, ...]) -> Iterator[None]:
    """Hold back what is written to file descriptor 2 while the block runs; one block of the process at a time.

    Args:
        prefixes: Lines that begin with one of these are dropped; the others are written after the block.
    """
    with _lock, tempfile.TemporaryFile() as kept:
        try:
            before = os.dup(2)
        except OSError:  # closed by the caller: there is nothing to hold back
            yield
            return
        sys.stderr.flush()
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            kept.seek(0)
            os.write(before, b"".join(line for line in kept if not line.startswith(prefixes)))
            os.close(before)
