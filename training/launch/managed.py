"""Processes that a training consists of: started with a log, and waited for until they listen."""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from training.processes.children import Child
from training.processes.exit_reason import CANNOT_WORK

START_S = 120.0
"""How long a server may take until it listens."""
STARTS = 4
"""How often a server is started that dies before it listens."""
log = logging.getLogger(__name__)


class SupervisorError(RuntimeError):
    """Training cannot begin or cannot go on."""


@dataclass
class ManagedProcess:
    """A process that belongs to the training."""

    name: str
    command: list[str]
    log: Path
    restarts: int
    """How often it may still be restarted."""
    process: Child | None = None
    ended: int | None = None
    """Exit status after which it is not started again."""
    lock: int | None = None
    """Descriptor of the training's lock: who has it open still holds it when the supervisor is killed."""

    def start(self) -> None:
        """Start it, with its output in its log."""
        inherited = () if self.lock is None else (self.lock,)
        self.process = Child(self.command, self.log, note=self.log.with_suffix(".exit-reason.txt"), pass_fds=inherited)

    def died(self) -> int | None:
        """Its exit status if it has ended since it was last started, else None."""
        return self.process.poll() if self.process is not None and self.ended is None else None

    def reason(self) -> str:
        """The exit reason that it left; empty if there is none."""
        return self.process.reason() if self.process is not None else ""

    def tail(self, lines: int = 15) -> str:
        """Its exit reason, or the end of its log since the last start."""
        return self.process.tail(lines) if self.process is not None else ""

    def address(self, note: Path) -> str:
        """Wait until a server that was started listens; one that dies meanwhile is started again, a few times.

        Args:
            note: Where it tells its `address` and `pid`.

        Raises:
            SupervisorError: If it cannot work, dies again and again, or does not listen in time.
        """
        assert self.process is not None
        deadline, starts = time.monotonic() + START_S, 1
        while time.monotonic() < deadline:
            if (status := self.died()) is not None:
                if status == CANNOT_WORK or starts == STARTS or self.process.reason():
                    often = f" at each of {starts} starts" if starts > 1 else ""
                    raise SupervisorError(f"{self.name} ended with status {status}{often}:\n{self.tail()}")
                log.warning("%s ended with status %d while it started, and is started again", self.name, status)
                starts += 1
                self.start()
            try:
                document = json.loads(note.read_text(encoding="utf-8"))
                if document["pid"] == self.process.pid:
                    return str(document["address"])
            except (OSError, ValueError, KeyError):
                pass
            time.sleep(0.05)
        raise SupervisorError(f"{self.name} did not listen within {START_S:.0f} s:\n{self.tail()}")

    def go_on_at(self, listen: str) -> None:
        """Have a server that is started again go on with what it knew, where it was.

        Args:
            listen: HOST:PORT.
        """
        self.command = [word for word in self.command if word != "--fresh"]
        self.command[self.command.index("--listen") + 1] = listen
