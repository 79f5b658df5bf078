"""The processes of a pipeline run: their roles, signals to them, and their end.

A process belongs to a run if its environment or command line contains the run's data folder. Its parent does not
matter, so orphans are found, too. Linux only.
"""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

COMMAND, GROUP, EVERYTHING, OTHER = "command", "group", "everything", "other"
"""The command; its process group (the target of Ctrl-C); all processes of the run; helpers without a role."""
MODULES = {
    "flows.cli.app": COMMAND,
    "uvicorn": "Prefect server",
    "mlflow": "MLflow server",
    "training.launch.supervisor": "supervisor",
    "training.coordinator.server": "coordinator",
    "training.parameter_server.server": "parameter server",
    "training.node.evaluator": "evaluator",
    "training.node.agent": "node",
    "torch.distributed.run": "torchrun agent",
    "training.node.rank": "learner",
    "training.exchange.daemon": "exchange daemon",
}
"""Role of each module run with `python -m`."""
WORKER = "runner worker"
_SPAWNED = "--multiprocessing-fork"


@dataclass(frozen=True)
class Found:
    """A live process of a run."""

    process: psutil.Process
    role: str

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self.process.pid)


def role_of(words: Sequence[str], parent: Sequence[str] = ()) -> str:
    """The role of a process.

    Args:
        words: Its command line.
        parent: Its parent's command line, which a forked child shares until it starts its own program.
    """
    if list(words) == list(parent):
        return OTHER
    if _SPAWNED in words:
        return WORKER
    # torchrun's command line names two modules: the first is its own
    module = next(
        (word for before, word in pairwise(words) if before in ("-m", "tasks.engine") and word in MODULES), ""
    )
    return MODULES.get(module, OTHER)


class Household:
    """The processes of a data folder.

    Args:
        home: The data folder; no other process has its path in its environment or command line.
    """

    def __init__(self, home: Path) -> None:
        self.home = str(home)
        self._strangers: set[tuple[int, float]] = set()

    def living(self) -> list[Found]:
        """All live processes, in the order of their start."""
        ours = [alive for process in psutil.process_iter() if (alive := self._look(process)) is not None]
        return sorted(ours, key=lambda alive: alive.process.create_time())

    def _look(self, process: psutil.Process) -> Found | None:
        try:
            began = process.create_time()
            identity = (process.pid, began)
            if identity in self._strangers or process.pid == os.getpid():
                return None
            words = process.cmdline()
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            if not self._is_ours(process, words):
                if time.time() > began + 5.0:  # a new process may not have started its own program yet
                    self._strangers.add(identity)
                return None
            parent = process.parent()
            return Found(process, role_of(words, parent.cmdline() if parent else ()))
        except psutil.Error:  # it has ended, or belongs to another user
            return None

    def _is_ours(self, process: psutil.Process, words: Sequence[str]) -> bool:
        if process.environ().get("STARLING_HOME") == self.home:
            return True
        return any(self.home in word for word in words)

    def wait_until_gone(self, patience_s: float) -> list[Found]:
        """Wait until no process is alive; returns those alive after the time-out."""
        deadline = time.monotonic() + patience_s
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.3)
        return left

    def end(self) -> None:
        """Kill all live processes."""
        for _ in range(20):
            left = self.living()
            if not left:
                return
            send(left, signal.SIGCONT)
            send(left, signal.SIGKILL)
            time.sleep(0.2)


def with_role(living: Iterable[Found], role: str) -> list[Found]:
    """The processes with a role; all of them for `everything`."""
    return [process for process in living if role == EVERYTHING or process.role == role]


def send(processes: Iterable[Found], number: signal.Signals) -> int:
    """Send a signal to processes; returns how many received it."""
    sent = 0
    for entry in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            entry.process.send_signal(number)
            sent += 1
    return sent


def describe(processes: Iterable[Found]) -> str:
    """Describe processes: role, process id, end of the command line, and status."""
    texts = []
    for entry in processes:
        with suppress(psutil.Error):
            texts.append(
                f"{entry.role} {entry.pid} ({' '.join(entry.process.cmdline())[-120:]}, {entry.process.status()})"
            )
    return "; ".join(texts)
