"""The managed processes of a training: start with a log, wait until a server listens, restart."""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from training.processes.children import Child
from training.processes.exit_reason import CANNOT_WORK
from training.processes.identity import ProcessIdentity

START_S = 120.0
"""How long a server may take until it listens."""
STARTS = 4
"""Maximum number of starts of a server that dies before it listens."""
log = logging.getLogger(__name__)


class SupervisorError(RuntimeError):
    """Training cannot start or continue."""


@dataclass
class ManagedProcess:
    """A process of the training."""

    name: str
    command: list[str]
    log: Path
    restarts: int
    """Number of restarts left."""
    process: Child | None = None
    ended: int | None = None
    """Final exit status, after which it is not restarted; None before."""
    lock: int | None = None
    """Descriptor of the training's lock: processes that inherit it keep the lock if the supervisor is killed."""
    detached: bool = False
    """Whether it is out of reach of the terminal's signals, such as Ctrl-C."""

    def start(self) -> None:
        """Start the process; its output goes to its log."""
        inherited = () if self.lock is None else (self.lock,)
        note = self.log.with_suffix(".exit-reason.txt")
        self.process = Child(self.command, self.log, note=note, pass_fds=inherited, start_new_session=self.detached)

    def died(self) -> int | None:
        """Its exit status if it has ended since the last start, else None."""
        return self.process.poll() if self.process is not None and self.ended is None else None

    def reason(self) -> str:
        """Its exit reason; empty if there is none."""
        return self.process.reason() if self.process is not None else ""

    def tail(self, lines: int = 15) -> str:
        """Its exit reason, or the end of its log since the last start."""
        return self.process.tail(lines) if self.process is not None else ""

    def address(self, note: Path) -> str:
        """Wait until a started server listens; restart it if it dies before, up to `STARTS` starts.

        Args:
            note: File to which it writes its `address` and its process; one of an earlier process is ignored.

        Returns:
            Its address, HOST:PORT.

        Raises:
            SupervisorError: If it cannot work as configured, dies at every start, or does not listen in time.
        """
        assert self.process is not None
        deadline, starts = time.monotonic() + START_S, 1
        while time.monotonic() < deadline:
            if (status := self.died()) is not None:
                if status == CANNOT_WORK or starts == STARTS or self.process.reason():
                    often = f" at each of {starts} starts" if starts > 1 else ""
                    raise SupervisorError(f"{self.name} ended with status {status}{often}:\n{self.tail()}")
                log.warning("%s ended with status %d during its start and is restarted", self.name, status)
                starts += 1
                self.start()
            try:
                document = json.loads(note.read_text(encoding="utf-8"))
                if ProcessIdentity.read(document) == ProcessIdentity.of(self.process.pid):
                    return str(document["address"])
            except (OSError, ValueError, KeyError, TypeError):
                pass
            time.sleep(0.05)
        raise SupervisorError(f"{self.name} did not listen within {START_S:.0f} s:\n{self.tail()}")

    def go_on_at(self, listen: str) -> None:
        """Make later restarts of a server continue from its saved state, at its current address.

        Args:
            listen: HOST:PORT.
        """
        self.command = [word for word in self.command if word != "--fresh"]
        self.command[self.command.index("--listen") + 1] = listen
