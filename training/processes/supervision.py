"""Supervision of child processes: they are restarted when they die, awaited until they answer, and ended together.

The processes of a training (`training.launch`), the ranks of a node (`training.node`), the coordinator of a `Ring`, and
the servers and workers of `starling up` (`flows.servers`) are supervised in this way; each says itself how it is
started and when it answers.
"""

import json
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from training.processes.children import Child, see_end
from training.processes.exit_reason import CANNOT_WORK
from training.processes.identity import ProcessIdentity

START_S = 120.0
"""How long a server of a training may take until it listens."""
STARTS = 4
"""Maximum number of starts of a server of a training that dies before it listens."""
LONGEST_PAUSE_S = 30.0
"""Longest pause before a restart."""
SAY_S = 10.0
"""Seconds between two messages about waiting."""


class SupervisorError(RuntimeError):
    """Training cannot start or continue."""


class Supervised(ABC):
    """A child process that is restarted when it dies, up to a limit.

    Args:
        name: Its name, for messages.
        restarts: How often it may die within the window.
        window_s: Window in seconds; earlier deaths do not count.
        pause_s: Pause before its first restart within the window, doubled at each further one; 0 for none.
        clock: Monotonic clock, in seconds.

    Attributes:
        hopeless: Exit statuses after which it is not restarted; nor is it if it has left an exit reason.
        process: The process; None before the first start.
        ended: Final exit status, after which it is left alone; None before.
    """

    hopeless: tuple[int, ...] = ()

    def __init__(
        self,
        name: str,
        restarts: int,
        window_s: float = math.inf,
        pause_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.restarts, self.window_s, self.clock = name, restarts, window_s, clock
        self.process: Child | None = None
        self.ended: int | None = None
        self.deaths: list[float] = []
        self._pause_s = pause_s
        self._due: float | None = None

    @abstractmethod
    def _launch(self) -> Child:
        """Start the process."""

    def answers(self) -> bool:
        """Whether the running process works; asked only while processes are awaited."""
        return True

    def start(self) -> None:
        """Start the process; its output goes to its log."""
        self.process, self._due = self._launch(), None

    @property
    def waiting(self) -> bool:
        """Whether it is dead and its restart is due later."""
        return self._due is not None

    def look(self, restarts: int | None = None, final: tuple[int, ...] = ()) -> str:
        """Restart the process if it has died, after a pause; call it about every second.

        Args:
            restarts: How often it may die; by default its own limit.
            final: Exit statuses that end it for good.

        Returns:
            A message about a death, or "".

        Raises:
            EndedError: If it is not restarted.
        """
        if self.process is None or self.ended is not None:
            return ""
        if self._due is None:
            return self._look_at(self.process, self.restarts if restarts is None else restarts, final)
        if self.clock() >= self._due:
            self.start()
        return ""

    def _look_at(self, process: Child, restarts: int, final: tuple[int, ...]) -> str:
        status, now = process.poll(), self.clock()
        if status is None:
            return ""
        if status in final:
            self.ended = status
            return ""
        self.deaths = [when for when in self.deaths if now - when < self.window_s] + [now]
        if len(self.deaths) > restarts or status in self.hopeless or process.reason():
            raise EndedError(self, status)
        pause = min(self._pause_s * 2 ** (len(self.deaths) - 1), LONGEST_PAUSE_S)
        if pause:
            self._due = now + pause
        else:
            self.start()
        when = f" in {pause:.0f} s" if pause else ""
        return f"{self.name} ended with status {status}; restarting it{when} ({process.log})"

    def reason(self) -> str:
        """Its exit reason; empty if there is none."""
        return self.process.reason() if self.process is not None else ""

    def tail(self, lines: int = 15) -> str:
        """Its exit reason, or the end of its log since the last start."""
        return self.process.tail(lines) if self.process is not None else ""

    def ask_to_end(self) -> None:
        """Ask the process to end, if it is running."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def see_end(self, patience_s: float) -> None:
        """Wait until the process has ended; kill it after the time limit."""
        if self.process is not None:
            see_end(self.process, patience_s)


class EndedError(SupervisorError):
    """A process has ended and is not restarted.

    Attributes:
        part: The process.
        status: Its exit status.
    """

    def __init__(self, part: Supervised, status: int) -> None:
        super().__init__(f"{part.name} ended with status {status} and is not restarted:\n{part.tail()}")
        self.part, self.status = part, status


class LateError(SupervisorError):
    """A process did not answer in time.

    Attributes:
        part: The process.
    """

    def __init__(self, part: Supervised, patience_s: float) -> None:
        super().__init__(f"{part.name} did not listen within {patience_s:.0f} s:\n{part.tail()}")
        self.part = part


def await_answers(
    parts: Sequence[Supervised],
    patience_s: float,
    starts: int,
    look_s: float,
    say: Callable[[str], None],
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until all processes answer; those that die meanwhile are restarted, up to a number of starts.

    Args:
        parts: The processes, which have been started.
        patience_s: Time limit for all together, in seconds.
        starts: Maximum number of starts of each.
        look_s: Seconds between two looks.
        say: Called with messages about deaths and, every ten seconds, about those that are waited for.
        stop: Ends the waiting when it is set.
        clock: Monotonic clock, in seconds.

    Raises:
        EndedError: If one is not restarted.
        LateError: If one does not answer in time.
    """
    began = clock()
    deadline, due = began + patience_s, began + SAY_S
    while not (stop is not None and stop.is_set()):
        # a dead one is not asked, since its open socket would let the request wait
        late = [part for part in parts if part.waiting or not part.answers()]
        if not late:
            return
        now = clock()
        if now > deadline:
            raise LateError(late[0], patience_s)
        if now >= due:
            say(f"waiting for {' and '.join(part.name for part in late)} ({now - began:.0f} s)")
            due = now + SAY_S
        for part in parts:
            if message := part.look(starts - 1):
                say(message)
        time.sleep(look_s)


class Ending(Protocol):
    """A process that can be ended."""

    def ask_to_end(self) -> None:
        """Ask it to end, if it is running."""

    def see_end(self, patience_s: float) -> None:
        """Wait until it has ended; kill it after the time limit."""


def end_together(parts: Iterable[Ending], patience_s: float) -> None:
    """End processes, all at the same time.

    Args:
        parts: The processes.
        patience_s: Time limit for all together; what still runs then is killed.
    """
    ending = list(parts)
    for part in ending:
        part.ask_to_end()
    deadline = time.monotonic() + patience_s
    for part in ending:
        part.see_end(max(0.0, deadline - time.monotonic()))


class ManagedProcess(Supervised):
    """A process of a training, restarted at once.

    Args:
        name: Its name.
        command: Its command line.
        log: Its log.
        restarts: How often it may die.
        lock: Descriptor of the training's lock: processes that inherit it keep the lock if the supervisor is killed.
        detached: Whether it is out of reach of the terminal's signals, such as Ctrl-C.
    """

    hopeless = (CANNOT_WORK,)

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        restarts: int,
        lock: int | None = None,
        detached: bool = False,
    ) -> None:
        super().__init__(name, restarts)
        self.command, self.log, self._lock, self._detached = command, log, lock, detached
        self._note: Path | None = None
        self._address = ""

    @override
    def _launch(self) -> Child:
        inherited = () if self._lock is None else (self._lock,)
        note = self.log.with_suffix(".exit-reason.txt")
        return Child(self.command, self.log, note=note, pass_fds=inherited, start_new_session=self._detached)

    @override
    def answers(self) -> bool:
        assert self.process is not None
        assert self._note is not None
        try:
            document = json.loads(self._note.read_text(encoding="utf-8"))
            if ProcessIdentity.read(document) != ProcessIdentity.of(self.process.pid):
                return False
            self._address = str(document["address"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def address(self, note: Path, say: Callable[[str], None] = lambda _: None) -> str:
        """Wait until a started server listens; restart it if it dies before, up to `STARTS` starts.

        Args:
            note: File to which it writes its `address` and its process; one of an earlier process is ignored.
            say: Called with messages about deaths and waiting.

        Returns:
            Its address, HOST:PORT.

        Raises:
            SupervisorError: If it cannot work as configured, dies at every start, or does not listen in time.
        """
        self._note = note
        try:
            await_answers([self], START_S, STARTS, 0.05, say)
        except EndedError as error:
            often = f" at each of {len(self.deaths)} starts" if len(self.deaths) > 1 else ""
            raise SupervisorError(f"{self.name} ended with status {error.status}{often}:\n{self.tail()}") from error
        return self._address

    def go_on_at(self, listen: str) -> None:
        """Make later restarts of a server continue from its saved state, at its current address.

        Args:
            listen: HOST:PORT.
        """
        self.command = [word for word in self.command if word != "--fresh"]
        self.command[self.command.index("--listen") + 1] = listen
