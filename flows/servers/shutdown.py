"""Shutdown of a process within ten seconds of a signal, with one message, and independent of its worker's death."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

from rich.console import Console

from training.processes.children import children

END_S = 8.7
"""Less than ten seconds, with a reserve for busy machines. A training gets slightly less, for its checkpoint."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PREFECT_HANDLER = "_prefect_sigterm_handler"
_AGAIN_S, _SAY_S = 0.05, 2.0
_GIVE_BACK_S = 1.2
"""What is left of the ten seconds for giving back this process's leases: a busy server answers the second attempt."""


class Countdown:
    """Kills this process and all its descendants if it has not ended some time after the first signal.

    A thread receives signals through Python's wakeup descriptor, since handlers run only between two bytecodes of the
    main thread, which may be in a long call. If a handler's exception is dropped because it cannot be propagated, in a
    callback from C or a finalizer, the thread sends the signal again.

    Args:
        patience_s: Seconds that the process has to end by itself.
        say: Called with the signal's number as soon as the thread receives it, in that thread.
    """

    def __init__(self, patience_s: float, say: Callable[[int], None] | None) -> None:
        self.number = 0
        """The first signal received."""
        self.raised = False
        """Whether a handler has started to end the main thread."""
        self.deadline = float("inf")
        """Time at which the process is killed."""
        self.status = 0
        """Exit status; 0 derives it from the signal."""
        self.say, self._patience_s = say, patience_s
        self.announced = threading.Event()
        """Set when `say` has returned."""
        self._dropped = threading.Event()
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if self._before != -1:  # another library uses the descriptor: rely on the handlers alone
            signal.set_wakeup_fd(self._before)
        threading.Thread(target=self._watch, name="end", daemon=True).start()

    def note(self, number: int) -> None:
        """Pass a signal to the thread; the first one counts."""
        with suppress(BlockingIOError):  # the pipe is full of signals already
            os.write(self._writer, bytes([number]))

    def close(self) -> None:
        """Stop listening for signals."""
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
        self.announced.set()
        main = threading.main_thread().ident
        while (left_s := self.deadline - time.monotonic()) > 0:
            if self._dropped.wait(left_s) and main is not None:
                self._dropped.clear()
                time.sleep(_AGAIN_S)
                signal.pthread_kill(main, number)
        end_hard(number)


_countdown: Countdown | None = None


class _Handler:
    """Signal handler that calls the previous handler once; later signals are ignored.

    Otherwise a second Ctrl-C would interrupt the clean-up.
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
    """Kill this process and all its descendants if it has not ended some time after SIGTERM or Ctrl-C.

    Prefect turns SIGTERM into an exception, which waits for threads to finish their work; a worker that cancels a run
    kills the process after half a minute, but not its children. After a signal the time limit also holds beyond the
    block.

    Args:
        patience_s: Seconds that the process has to end by itself.
        say: Called once, with the signal's number, in another thread; within another such block the outer one counts.
    """
    global _countdown
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can install handlers
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
    """Install our handler in front of the current one, unless it is installed already.

    This also applies if Ctrl-C is ignored, as in a background job of a script: it ends together with the script.
    """
    before: Any = signal.getsignal(number)
    if isinstance(before, _Handler):
        return False
    handler = _Handler(countdown, before)
    signal.signal(number, handler)
    engine: Any = sys.modules.get("prefect.utilities.engine")
    if before is getattr(engine, _PREFECT_HANDLER, ()):
        # otherwise each nested flow would restore Prefect's handler, which has no time limit
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


def cause(number: int) -> str:
    """What a user calls a signal that asked this process to end."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def shutdown_signal() -> int:
    """The signal that asked this process to end; 0 if there was none."""
    return _countdown.number if _countdown else 0


def interrupted() -> bool:
    """Whether a signal asked this process to end, and it runs in a terminal, where it prints a message."""
    return bool(shutdown_signal()) and _countdown is not None and _countdown.say is not None


def left_s() -> float:
    """Seconds until this process is killed; infinite before a signal."""
    return max(0.0, _countdown.deadline - time.monotonic()) if _countdown else float("inf")


def end_now() -> None:
    """Exit with status 0 at once: the interpreter's shutdown would take seconds with Prefect loaded."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_if_signalled() -> None:
    """End this process if a signal asked for it, without exit handlers: those of some libraries wait for servers."""
    if number := shutdown_signal():
        if _countdown is not None:
            _countdown.announced.wait(_SAY_S)  # the thread may not have printed the message yet
        sys.stdout.flush()
        sys.stderr.flush()
        end_hard(number)


def end_because(say: Callable[[], None]) -> None:
    """End this process as a signal would, but with status 1; may be called in any thread.

    Args:
        say: Prints the reason; called once, unless a signal has already asked the process to end.
    """
    if shutdown_signal():
        return
    if _countdown is None:
        say()
    else:
        _countdown.status, _countdown.say = 1, lambda _: say()
    os.kill(os.getpid(), signal.SIGTERM)


def end_hard(number: int = signal.SIGTERM) -> None:
    """Kill all descendants of this process, give back its leases, and exit.

    Args:
        number: The signal that caused it; determines the exit status unless the countdown has one.
    """
    for pid in children(all_generations=True):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if leases := sys.modules.get("tasks.locking.leases"):  # not imported: there are none
        leases.give_back_all(_GIVE_BACK_S)
    os._exit((_countdown and _countdown.status) or 128 + number)


def outlive_reader() -> None:
    """Keep running when the reader of this process's output is gone, for example a killed worker.

    Otherwise Prefect's console handler would end the process, and a long training with it, at its next line.
    """
    for console in _log_consoles():
        console.on_broken_pipe = partial(_fall_silent, console)  # type: ignore[method-assign]


def silence_logs() -> None:
    """Stop printing the libraries' logs to the terminal: errors during a shutdown are expected."""
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
