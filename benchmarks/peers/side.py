"""One of two concurrent systems: its stage, its learners, and their measurements."""

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.board import Board
from benchmarks.common import BenchmarkError
from benchmarks.peers.base import LR, MissingError, Setup, find
from benchmarks.peers.stage import open_board
from benchmarks.scaling_probes import running, tree_cpu
from training.processes.children import end_of_log, stop

_ROOT = Path(__file__).resolve().parents[2]
_ANSWER_S = 120.0
_PORTS = 4


@dataclass(frozen=True)
class Scenario:
    """The scenario of both systems of a pair.

    Attributes:
        name: Name of the row.
        learners: Learners per system.
        params: Number of weights.
        step_s: Seconds per gradient.
        slow: Factor by which the last learner's gradients take longer.
        kills: Whether the last learner is killed and replaced.
    """

    name: str
    learners: int
    params: int
    step_s: float
    slow: float = 1.0
    kills: bool = False


@dataclass(frozen=True)
class Counters:
    """Totals over all processes of a system so far."""

    cpu_s: float
    sent: float | None
    steps: int


class Side:
    """A running system.

    Args:
        name: Its name in the registry.
        python: Interpreter of its environment.
        sgp: Folder of the source of the SGP systems.
        folder: Folder for all its files.

    Raises:
        MissingError: The system is not installed; the message says how to install it.
    """

    def __init__(self, name: str, python: str, sgp: Path | None, folder: Path) -> None:
        self.name, self.system = name, find(name)
        self.folder, self.scenario = folder, Scenario("", 0, 0, 0.0)
        self.boards: list[Board] = []
        self.pids: list[int] = []
        folder.mkdir()
        words = [python, "-m", "benchmarks.peers.stage", name, "--parent", str(os.getpid())]
        words += ["--sgp", str(sgp)] if sgp else []
        # files left by killed processes are removed with the folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), "TMPDIR": str(folder)}
        with (folder / "stage.log").open("ab") as log:
            self._stage = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                env=environment,
                start_new_session=True,
            )
        try:
            answer = self._hear()
        except BenchmarkError:
            self.close()
            raise
        if "missing" in answer:
            self.close()
            raise MissingError(answer["missing"])
        self.own_network = bool(answer["own_network"])

    def _hear(self) -> dict[str, Any]:
        assert self._stage.stdout is not None
        if select.select([self._stage.stdout], [], [], _ANSWER_S)[0] and (line := self._stage.stdout.readline()):
            answer: dict[str, Any] = json.loads(line)
            return answer
        raise BenchmarkError(f"the process of {self.name} does not answer:\n{end_of_log(self.folder / 'stage.log')}")

    def _order(self, **order: Any) -> dict[str, Any]:
        assert self._stage.stdin is not None
        try:
            self._stage.stdin.write(json.dumps(order, default=str).encode() + b"\n")
            self._stage.stdin.flush()
        except OSError as error:
            raise BenchmarkError(f"the process of {self.name} has ended: {error}") from error
        return self._hear()

    # --- a run

    def start(self, scenario: Scenario, number: int, exchange: Mapping[str, str]) -> None:
        """Start the learners of a scenario without waiting.

        Args:
            scenario: The scenario.
            number: Number of the run, used in its folder's name.
            exchange: Fields of Starling's `train.exchange` and `train.strategy`.
        """
        self.scenario, run = scenario, self.folder / f"run-{number}"
        run.mkdir()
        self._setup = Setup(
            0, scenario.learners, scenario.params, scenario.step_s, run, _free_ports(), exchange=exchange
        )
        self.service = self._order(do="serve", setup=asdict(self._setup))["pid"]
        self.boards = [open_board(run, number) for number in range(scenario.learners)]
        self.pids = [self._learner(number, joining=False) for number in range(scenario.learners)]

    def _learner(self, number: int, joining: bool) -> int:
        scenario, last = self.scenario, number == self.scenario.learners - 1
        changes = {
            "number": number,
            "slow": scenario.slow if last else 1.0,
            "joining": joining,
        }
        return int(self._order(do="learn", setup=asdict(self._setup) | changes)["pid"])

    def ready(self) -> bool:
        """Whether all learners wait for the start.

        Raises:
            BenchmarkError: A learner has ended.
        """
        if not all(map(self.alive, range(len(self.pids)))):
            raise BenchmarkError(f"a learner of {self.name} has ended:\n{self.log()}")
        return all(board.ready for board in self.boards)

    def go(self) -> None:
        """Start training."""
        for board in self.boards:
            board.extra[0] = 1

    def kill(self) -> None:
        """Kill the last learner and its child processes, like a failure of its machine."""
        self._order(do="kill", pid=self.pids[-1])

    def replace(self) -> None:
        """Start a newcomer to replace the killed learner; it trains as soon as it is ready."""
        last = self.scenario.learners - 1
        self._setup.folder.joinpath(f"board-{last}").unlink()
        self.boards[last] = open_board(self._setup.folder, last)
        self.boards[last].extra[0] = 1
        self.pids[last] = self._learner(last, joining=True)

    def alive(self, number: int) -> bool:
        """Whether a learner is running."""
        return running(self.pids[number])

    def log(self) -> str:
        """The last lines of each process's log."""
        return "\n".join(end_of_log(file, lines=4) for file in sorted(self._setup.folder.glob("*.log")))

    def counters(self) -> Counters:
        """Totals of its processes so far."""
        steps = sum(len(board.stamps()) for board in self.boards)
        return Counters(tree_cpu(self._stage.pid), self._sent(), steps)

    def _sent(self) -> float | None:
        """Bytes sent on its loopback interface, including headers; None if it shares the machine's."""
        if not self.own_network:
            return None
        for line in Path(f"/proc/{self._stage.pid}/net/dev").read_text().splitlines():
            device, _, figures = line.partition(":")
            if device.strip() == "lo":
                return float(figures.split()[8])
        return None

    def distance(self) -> float:
        """Root mean square distance of replicas from their mean, in units of a weight's change in one step."""
        alive = [board.extra[1:] for number, board in enumerate(self.boards) if self.alive(number)]
        if not alive:
            return 0.0
        samples = np.stack(alive)
        return float(np.sqrt(np.square(samples - samples.mean(0)).mean())) / LR

    def stamps(self) -> list[NDArray[np.float64]]:
        """End times of each learner's steps."""
        return [board.stamps() for board in self.boards]

    def clear(self) -> None:
        """End all processes of the run and remove its files."""
        self._order(do="clear")
        shutil.rmtree(self._setup.folder, ignore_errors=True)
        self.boards, self.pids = [], []

    def close(self) -> None:
        """End all processes of the system."""
        for pipe in (self._stage.stdin, self._stage.stdout):
            assert pipe is not None
            pipe.close()
        stop(self._stage, 15.0)


def interpreter(name: str, elsewhere: str) -> str:
    """The interpreter for a system.

    Args:
        name: The system.
        elsewhere: Interpreter of the other environment; empty for none.
    """
    return elsewhere if elsewhere and find(name).elsewhere else sys.executable


def _free_ports() -> tuple[int, ...]:
    """Find free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(_PORTS)]
    try:
        return tuple(probe.getsockname()[1] for probe in sockets)
    finally:
        for probe in sockets:
            probe.close()


def wait_until(done: Any, patience_s: float) -> bool:
    """Wait until a condition is true; returns False on time-out."""
    deadline = time.monotonic() + patience_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
