"""The end of a process: within ten seconds of being told to, said once, and not because its worker has died."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

END_S = 9.2
"""Of the ten; a busy machine needs the rest. A training that is asked to end has a little less, for a checkpoint."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PREFECT_HANDLER = "_prefect_sigterm_handler"
_AGAIN_S, _SAY_S = 0.05, 2.0


class Countdown:
    """Ends this process hard, with all that it started, a while after the first signal that asks it to end.

    A thread hears of signals through Python's wakeup descriptor: handlers run between two bytecodes of the main thread
    only, which may be in the middle of a long call. And what a handler raises is dropped where it cannot be caught, in
    a callback from C or a finalizer: then the thread sends the signal again.

    Args:
        patience_s: Seconds that the process has to end by itself.
        say: Called with the signal's number as soon as it is heard, in that thread.
    """

    def __init__(self, patience_s: float, say: Callable[[int], None] | None) -> None:
        self.number = 0
        """The signal that was heard first."""
        self.raised = False
        """Whether a handler has started to end the main thread."""
        self.deadline = float("inf")
        """When the process is ended hard."""
        self.status = 0
        """Exit status, where it is not the signal that gives the reason."""
        self.say, self._patience_s = say, patience_s
        self.said = threading.Event()
        """Set when `say` has returned."""
        self._dropped = threading.Event()
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if self._before != -1:  # somebody else's, who relies on it: then the handlers have to do
            signal.set_wakeup_fd(self._before)
        threading.Thread(target=self._watch, name="end", daemon=True).start()

    def note(self, number: int) -> None:
        """Tell the thread of a signal; the first one counts."""
        with suppress(BlockingIOError):  # full of signals already
            os.write(self._writer, bytes([number]))

    def close(self) -> None:
        """Hear of no signal any more."""
        sys.unraisablehook = self._hook
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)

    def _unraisable(self, about: Any) -> None:
        if self.number and about.exc_type is not None and not issubclass(about.exc_type, Exception):
            self.raised = False
            self._dropped.set()
        elif not (self.number and self.say):
            self._hook(about)

    def _watch(self) -> None:
        while heard := os.read(self._reader, 64):
            wanted = [number for number in heard if number in SIGNALS]
            if wanted:
                self._end(wanted[0])
        os.close(self._reader)

    def _end(self, number: int) -> None:
        self.number = self.number or number
        self.deadline = time.monotonic() + self._patience_s
        if self.say:
            silence_logs()
            threading.excepthook = lambda _: None
            with suppress(Exception):
                self.say(number)
        self.said.set()
        main = threading.main_thread().ident
        while (left_s := self.deadline - time.monotonic()) > 0:
            if self._dropped.wait(left_s) and main is not None:
                self._dropped.clear()
                time.sleep(_AGAIN_S)
                signal.pthread_kill(main, number)
        end_hard(number)


_countdown: Countdown | None = None


class _Handler:
    """What this process does on a signal: what it did before, once; later ones change nothing.

    A second Ctrl-C would otherwise interrupt the clean-up.
    """

    def __init__(self, countdown: Countdown, before: Any) -> None:
        self._countdown, self.before = countdown, before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._countdown.note(number)
        if self._countdown.raised:
            return
        self._countdown.raised, self._countdown.number = True, self._countdown.number or number
        if callable(self.before):
            self.before(number, frame)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def bounded_end(patience_s: float = END_S, say: Callable[[int], None] | None = None) -> Iterator[None]:
    """End this process hard, with all that it started, when it is still there a while after SIGTERM or Ctrl-C.

    Prefect turns SIGTERM into an exception, which waits for threads in the middle of a piece of work; a worker that
    cancels a run would kill the process after half a minute, but not what that has started. Once the process has been
    told to end, this holds beyond the block as well.

    Args:
        patience_s: Seconds that it has to end by itself.
        say: Called once, with the signal's number, in another thread; within another such block the outer one counts.
    """
    global _countdown
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    outermost = _countdown is None
    countdown = _countdown = _countdown or Countdown(patience_s, say)
    installed = [number for number in SIGNALS if _install(number, countdown)]
    try:
        yield
    finally:
        if not countdown.number:
            for number in installed:
                _restore(number)
            if outermost:
                countdown.close()
                _countdown = None


def _install(number: int, countdown: Countdown) -> bool:
    """Put our handler before the present one, unless it is there already.

    Also where Ctrl-C is ignored, as for a job in a script's background: what ends the script ends its jobs.
    """
    before: Any = signal.getsignal(number)
    if isinstance(before, _Handler):
        return False
    handler = _Handler(countdown, before)
    signal.signal(number, handler)
    engine: Any = sys.modules.get("prefect.utilities.engine")
    if before is getattr(engine, _PREFECT_HANDLER, ()):
        # otherwise each flow within this flow would put Prefect's handler back, which knows no bound
        setattr(engine, _PREFECT_HANDLER, handler)
    return True


def _restore(number: int) -> None:
    handler = signal.getsignal(number)
    if not isinstance(handler, _Handler):
        return
    signal.signal(number, handler.before)
    engine: Any = sys.modules.get("prefect.utilities.engine")
    prefects: Any = getattr(engine, _PREFECT_HANDLER, None)
    if prefects is handler:
        setattr(engine, _PREFECT_HANDLER, handler.before)


def told() -> int:
    """The signal that has told this process to end; 0 if none has."""
    return _countdown.number if _countdown else 0


def interrupted() -> bool:
    """Whether this process was told to end, and is one that says so: that of a terminal."""
    return bool(told()) and _countdown is not None and _countdown.say is not None


def left_s() -> float:
    """Seconds until this process, which was told to end, is ended hard."""
    return max(0.0, _countdown.deadline - time.monotonic()) if _countdown else float("inf")


def end_now() -> None:
    """End this process, which has done its work, with success: taking Prefect's heap apart would take seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_if_told() -> None:
    """End this process if it was told to, without the exit handlers of libraries, some of which wait for servers."""
    if number := told():
        if _countdown is not None:
            _countdown.said.wait(_SAY_S)  # by the other thread, which may not have come to it yet
        sys.stdout.flush()
        sys.stderr.flush()
        end_hard(number)


def end_because(say: Callable[[], None]) -> None:
    """End this process as a signal would, for a reason of its own, with status 1; called in any thread.

    Args:
        say: Tells the reason, once, unless the process was told to end before.
    """
    if told():
        return
    if _countdown is None:
        say()
    else:
        _countdown.status, _countdown.say = 1, lambda _: say()
    os.kill(os.getpid(), signal.SIGTERM)


def end_hard(number: int = signal.SIGTERM) -> None:
    """Kill what this process has started, and end it.

    Args:
        number: The signal that is the reason; it shows in the exit status, unless there is another one.
    """
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit((_countdown and _countdown.status) or 128 + number)


def descendants(root: int) -> list[int]:
    """Numbers of the processes below one, as far as the system tells."""
    children = family()
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def family() -> dict[int, list[int]]:
    """Numbers of each process's children, as far as the system tells."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    return children


def outlive_reader() -> None:
    """Go on when this process's output is not read any more, for example when its worker has been killed.

    Prefect's console handler would end the process at its next line, and with it a training of days.
    """
    for console in _log_consoles():
        console.on_broken_pipe = partial(_fall_silent, console)  # type: ignore[method-assign]


def silence_logs() -> None:
    """Let the libraries' logs leave the terminal alone: what still fails while a process ends is no news."""
    for console in _log_consoles():
        console.quiet = True


def _log_consoles() -> set[Console]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    return {handler.console for handler in handlers if isinstance(getattr(handler, "console", None), Console)}


def _fall_silent(console: Console) -> None:
    console.quiet = True
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, console.file.fileno())
    os.close(null)
