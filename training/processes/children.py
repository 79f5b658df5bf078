"""Child processes: start with a log, end with the parent, stop within a bounded time."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from training.processes.exit_reason import read_reason, reserve_note

_ROOT = str(Path(__file__).resolve().parents[2])
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def bind_to_parent(number: int = signal.SIGTERM) -> None:
    """Have Linux send this process a signal when its parent dies, even by SIGKILL; no effect on other systems.

    Suitable as `preexec_fn`. It does not notice a parent that has already died; `end_with_parent` does.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number))


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Like `bind_to_parent`, for calls from the child's own code.

    Args:
        parent: The parent's process id, passed on by the parent: it may die before this process can ask for it.
        number: The signal.

    Raises:
        SystemExit: If the parent is already dead.
    """
    bind_to_parent(number)
    if _libc is not None and os.getppid() != parent:
        raise SystemExit("the parent died before this process started")


def on_termination(stop: Callable[[], object]) -> None:
    """Call a function instead of ending when this process receives SIGTERM or SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, for example flows of a killed worker."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stop(process: "subprocess.Popen[bytes]", patience_s: float = 8.0) -> None:
    """Stop a child: SIGTERM, and SIGKILL after `patience_s`."""
    if process.poll() is None:
        process.terminate()
    see_end(process, patience_s)


def see_end(process: "subprocess.Popen[bytes]", patience_s: float) -> None:
    """Wait for a child that was asked to end, and kill it after `patience_s`."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def watched(child: "Child", on_poll: Callable[[], None], end_s: float, poll_s: float = 1.0) -> None:
    """Wait until a child has ended; an exception of what watches it ends it first.

    Args:
        child: The child.
        on_poll: Called every `poll_s` seconds while it runs.
        end_s: Seconds that it may take to end.
        poll_s: Seconds between polls.
    """
    try:
        while child.poll() is None:
            on_poll()
            time.sleep(poll_s)
    except BaseException:
        stop(child, end_s)
        raise


def children(process: int | None = None, *, all_generations: bool = False) -> list[int]:
    """Ids of a process's children, including zombies.

    Args:
        process: Process id; by default this process.
        all_generations: Whether to include all descendants.
    """
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(process).children(recursive=all_generations)]
    return []


def log_size(log: Path) -> int:
    """Size of a log in bytes; 0 if there is none."""
    return log.stat().st_size if log.exists() else 0


def end_of_log(log: Path, since: int = 0, lines: int = 15) -> str:
    """The last lines of a log, for a message about the process that wrote it.

    Args:
        log: The file; a missing one counts as empty.
        since: Bytes to skip (see `log_size`), because output of an earlier process would be misleading.
        lines: Maximum number of lines.
    """
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(since)
        return "\n".join(file.read().decode("utf-8", errors="replace").splitlines()[-lines:])


class Child(subprocess.Popen[bytes]):
    """A child process without input whose output is appended to a log.

    It imports the same copy of Starling as this process, installed or not.

    Args:
        command: The command and its arguments.
        log: The log file; its folder is created.
        environment: Environment variables in addition to those of this process.
        note: File for the child's exit reason, see `training.processes.exit_reason`.
        **options: Options of `subprocess.Popen`.
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
        """The child's exit reason; empty if it left none."""
        return read_reason(self.note) if self.note else ""

    def tail(self, lines: int = 15) -> str:
        """The child's exit reason, or the last lines of its output."""
        return self.reason() or end_of_log(self.log, self.log_begin, lines)


def exit_at_once(status: int) -> NoReturn:
    """End this process after flushing its output, without shutting down the interpreter.

    At shutdown, library threads that are still running (of torch, Gloo, Arrow) sometimes abort the process or hang
    forever (pytorch/pytorch#38228).
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream is closed, or its reader is gone
            stream.flush()
    os._exit(status)


# --- the program that runs the engine's processes


_program: list[str] = []


def run_by(module: str) -> None:
    """Start further processes by a program that knows tasks.

    The engine's modules are programs, `python -m training.node.rank …`, but know no task by themselves. A program that
    does calls `training.learner.task.know_tasks`, and `run_by` with its own name, and runs the module that it is
    given. All processes are then started by it: `python -m PROGRAM training.node.rank …`.

    Args:
        module: The program's module; it runs the module that is its first argument.
    """
    _program[:] = [module]


def engine_command(module: str, *words: str) -> list[str]:
    """The command line of one of the engine's processes.

    Args:
        module: The process's module.
        words: Its arguments.
    """
    return [sys.executable, *engine_words(module, *words)]


def engine_words(module: str, *words: str) -> list[str]:
    """As `engine_command`, without the interpreter."""
    return ["-m", *_program, module, *words]
