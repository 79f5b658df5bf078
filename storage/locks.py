"""Locks between processes of one machine, which the system releases if their owner dies."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO


class LockTimeoutError(TimeoutError):
    """Another process holds the lock for longer than the time-out."""


@contextmanager
def file_lock(
    path: Path, wait_s: float, poll_s: float = 0.2, holder: str = "", on_wait: Callable[[str], None] | None = None
) -> Iterator[int]:
    """Hold an exclusive lock while the block runs.

    The lock is held while its file descriptor is open: a child that inherits it keeps the lock if its parent dies.

    Args:
        path: Lock file; created if missing, never deleted (otherwise two processes could hold "the" lock).
        wait_s: Maximum seconds to wait for another process.
        poll_s: Seconds between attempts.
        holder: Description of this lock owner for other processes; its process id by default.
        on_wait: Called with the current owner's description after each attempt that fails.

    Yields:
        The lock's file descriptor.

    Raises:
        LockTimeoutError: If another process still holds the lock after `wait_s`; the message names it.
    """
    with any_file_lock([path], wait_s, poll_s, holder, on_wait) as descriptor:
        yield descriptor


@contextmanager
def any_file_lock(
    paths: Sequence[Path],
    wait_s: float,
    poll_s: float = 0.2,
    holder: str = "",
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[int]:
    """Hold one of several locks, the first free one, while the block runs; otherwise like `file_lock`."""
    with ExitStack() as stack:
        files = []
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.append(stack.enter_context(path.open("a+")))
        deadline = time.monotonic() + wait_s
        while (file := next(filter(_locked_now, files), None)) is None:
            owners = [path.read_text(encoding="utf-8").strip() for path in paths]
            others = " and ".join(owner or "another process" for owner in owners)
            if time.monotonic() > deadline:
                names = " and ".join(map(str, paths))
                raise LockTimeoutError(f"{names} is held by {others}: wait for it, or end it")
            if on_wait is not None and all(owners):  # an owner writes its name right after it has taken the lock
                on_wait(others)
            time.sleep(poll_s)
        file.truncate(0)
        file.write(holder or f"process {os.getpid()}")
        file.flush()
        yield file.fileno()


def _locked_now(file: TextIO) -> bool:
    """Try to lock an open file; returns whether it succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def passing_lock(path: Path, wait_s: float, poll_s: float = 0.05) -> Iterator[None]:
    """Hold a short-lived exclusive lock, whose file is removed on release.

    Args:
        path: Lock file in an existing folder.
        wait_s: Maximum seconds to wait for another process.
        poll_s: Seconds between attempts.

    Raises:
        LockTimeoutError: If another process still holds the lock after `wait_s`.
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
    """Try to lock; fails if another process holds the lock, or if its previous owner has removed the file meanwhile."""
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
