"""Child processes that end with their parent, and that are ended within a bounded time."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def bind_to_parent(number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent dies, kill -9 included; elsewhere do nothing.

    It fits `preexec_fn`; a parent that died before goes unnoticed, for which see `end_with_parent`.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number))


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Like `bind_to_parent`, from the child's own code.

    Args:
        parent: The parent's process number, from the parent itself: it may have died before this process could ask.
        number: The signal.

    Raises:
        SystemExit: If the parent is dead already.
    """
    bind_to_parent(number)
    if _libc is not None and os.getppid() != parent:
        raise SystemExit("the parent died before this process could begin")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies: flows of a killed worker, for example."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Let the processes (and threads) that are started in the block ignore Ctrl-C, which is for this one to heed.

    For those that a library starts; what starts its children itself gives them a session of their own.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop(process: "subprocess.Popen[bytes]", patience_s: float = 8.0) -> None:
    """End a child: politely, then not."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def log_size(log: Path) -> int:
    """Bytes that a log has, noted when a process is started with it: what comes after is from this start."""
    return log.stat().st_size if log.exists() else 0


def end_of_log(log: Path, since: int = 0, lines: int = 15) -> str:
    """The last lines of a log, for a message about the process that wrote it.

    Args:
        log: The file; none is as good as an empty one.
        since: Bytes to pass over, see `log_size`: what an earlier process wrote would mislead.
        lines: How many at most.
    """
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(since)
        return "\n".join(file.read().decode("utf-8", errors="replace").splitlines()[-lines:])
