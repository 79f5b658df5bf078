"""A lock between the processes of one machine, freed by the system when its holder dies."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LockTimeoutError(TimeoutError):
    """Another process has held a lock for too long."""


@contextmanager
def file_lock(path: Path, wait_s: float, poll_s: float = 0.2) -> Iterator[int]:
    """Hold an exclusive lock while the block runs.

    It belongs to whoever has the file descriptor open: a child that inherits it keeps the lock when its parent dies.

    Args:
        path: Lock file; made if missing, never deleted (deleting it would let two processes hold "the" lock).
        wait_s: Seconds to wait for another holder.
        poll_s: Seconds between attempts.

    Yields:
        The lock's file descriptor.

    Raises:
        LockTimeoutError: If another process still holds it after `wait_s`; the message names that process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = path.read_text(encoding="utf-8").strip() or "another process"
                    raise LockTimeoutError(f"{path} is held by {holder}: wait for it, or end it") from None
                time.sleep(poll_s)
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield file.fileno()


@contextmanager
def passing_lock(path: Path, wait_s: float, poll_s: float = 0.05) -> Iterator[None]:
    """Hold an exclusive lock of the moment, whose file is removed with it.

    Args:
        path: Lock file in a folder that exists.
        wait_s: Seconds to wait for another holder.
        poll_s: Seconds between attempts.

    Raises:
        LockTimeoutError: If another process still holds it after `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    while True:
        with path.open("a") as file:
            if _hold(file.fileno(), path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        if time.monotonic() > deadline:
            raise LockTimeoutError(f"{path} is held by another process: wait for it, or end it")
        time.sleep(poll_s)


def _hold(descriptor: int, path: Path) -> bool:
    """Take the lock, unless another has it or the file's former holder has removed the file meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def is_locked(path: Path) -> bool:
    """Whether a living process holds `file_lock` on a file."""
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
