"""Child processes: started with a log, ended with their parent or within a bounded time."""

import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from training.processes.exit_reason import read_reason, reserve_note

_ROOT = str(Path(__file__).resolve().parents[2])
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


@contextmanager
def starting_workers() -> Iterator[None]:
    """Start processes of a pool in the block: Ctrl-C does not reach them until they call `begin_worker`.

    Otherwise each would show a traceback of whatever it was importing. For this process the signal waits until the
    block ends; it is not lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """Make this process of a pool end with its parent, kill -9 included, and on Ctrl-C without a word.

    It fits a pool's `initializer`. A worker holds both ends of the pool's queue, so that it would wait there for ever
    when its parent has been killed. The parent is watched by a thread: Linux's signal would come when the thread that
    started the worker ends, which is not always the main one.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, name="parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies: flows of a killed worker, for example."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stop(process: "subprocess.Popen[bytes]", patience_s: float = 8.0) -> None:
    """End a child: politely, then not."""
    if process.poll() is None:
        process.terminate()
    see_end(process, patience_s)


def see_end(process: "subprocess.Popen[bytes]", patience_s: float) -> None:
    """Wait for the end of a child that was asked to end, and kill it after that time."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def children(process: int | None = None, *, all_generations: bool = False) -> list[int]:
    """Numbers of a process's children, those included that have ended and were not waited for.

    Args:
        process: Its number; by default this process.
        all_generations: Whether the children's children count, too.
    """
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(process).children(recursive=all_generations)]
    return []


def log_size(log: Path) -> int:
    """Bytes that a log has; 0 if there is none."""
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


class Child(subprocess.Popen[bytes]):
    """A child process without input whose output is appended to a log.

    It imports the same Starling as this process, installed or not.

    Args:
        command: Words.
        log: The file; its folder is made.
        environment: Variables besides those of this process.
        note: Takes the child's exit reason, see `training.processes.exit_reason`.
        **options: Of `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        note: Path | None = None,
        **options: Any,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.note, self.log_begin = log, note, log_size(log)
        path = os.pathsep.join(part for part in (_ROOT, os.environ.get("PYTHONPATH", "")) if part)
        variables = {**os.environ, "PYTHONPATH": path, **(reserve_note(note) if note else {}), **(environment or {})}
        with log.open("ab") as out:
            super().__init__(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=variables, **options)

    def reason(self) -> str:
        """The exit reason that the child left; empty if it left none."""
        return read_reason(self.note) if self.note else ""

    def tail(self, lines: int = 15) -> str:
        """The child's exit reason, or the last lines of its output."""
        return self.reason() or end_of_log(self.log, self.log_begin, lines)


def exit_at_once(status: int) -> NoReturn:
    """End this process, which has done and said everything, without taking the interpreter down.

    Threads of libraries that still compute then (torch's, Gloo's, Arrow's) abort the process now and then, or stand
    still for ever (pytorch/pytorch#38228).
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or its reader has left
            stream.flush()
    os._exit(status)
