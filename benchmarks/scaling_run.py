"""One run of `benchmarks.scaling`: a coordinator, learners, optionally machines with shaped links; and its figures.

A run has its own process (the stage), whose network namespace contains the coordinator. Learners are forked from it, so
that torch is loaded once; all learners and their children end with it, however it ends.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import netns
from benchmarks.board import Board
from benchmarks.scaling_coordinator import coordinator_address, start_coordinator
from benchmarks.scaling_learner import Setup, run
from benchmarks.scaling_probes import machine_cpu, rate, tree_cpu
from benchmarks.scaling_scenario import Measured, Scenario
from training.config import TrainConfig
from training.processes.children import end_with_parent, stop
from training.strategies.gossip import GossipConfig

START_S = 120.0
_FORK = multiprocessing.get_context("fork")


class RunError(RuntimeError):
    """A run could not be measured; the message contains the end of the failed process's log."""


def measure(scenario: Scenario) -> Measured:
    """Run a scenario in a separate process.

    Raises:
        RunError: If the run failed.
    """
    reader, writer = _FORK.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        stage = _FORK.Process(target=_stage, args=(scenario, Path(folder), writer, os.getpid()))
        stage.start()
        writer.close()
        try:
            answer: dict[str, Any] = json.loads(reader.recv_bytes())
            stage.join(20)
        except EOFError:
            raise RunError(f"{scenario.strategy} x {scenario.learners}: the run's process has ended") from None
        finally:
            if stage.is_alive():
                stage.terminate()
                stage.join(10)
                stage.kill()
                stage.join()
            reader.close()
    if "error" in answer:
        raise RunError(f"{scenario.strategy} x {scenario.learners}, {scenario.condition}: {answer['error']}")
    return Measured(**answer)


def _stage(scenario: Scenario, folder: Path, writer: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    end_with_parent(parent, signal.SIGKILL)
    try:
        with _Stage(scenario, folder) as stage:
            answer = asdict(stage.measure())
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    writer.send_bytes(json.dumps(answer).encode())


class _Stage:
    """The processes of a run, ready to start."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.shard = np.repeat(np.arange(scenario.num_shards), scenario.per_shard)
        self.boards = [Board() for _ in range(scenario.learners)]
        self.learners: list[BaseProcess] = []
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.start = _FORK.Event()
        self.switch: netns.Switch | None = None
        self.began = 0.0
        self.closed: list[float] = []
        self._journal = ""

    def __enter__(self) -> "_Stage":
        try:
            if self.scenario.rate:
                machines = self.scenario.learners if self.scenario.apart else self.scenario.nodes
                self.switch = netns.Switch(machines, self.scenario.rate)
            self._start_coordinator()
            address = self._coordinator_address()
            for number in range(self.scenario.learners):
                self._start_learner(number, address)
            self._await(lambda: all(board.ready for board in self.boards), "the learners are not ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for learner in self.learners:
            learner.kill()  # ends their exchanges, too
        for learner in self.learners:
            learner.join()
        if self.coordinator is not None:
            stop(self.coordinator, 3.0)

    # --- starting

    def _start_coordinator(self) -> None:
        scenario = self.scenario
        train = {
            "strategy": scenario.strategy,
            "nodes": scenario.nodes,
            "learners_per_node": scenario.ranks,
        }
        host = netns.SWITCH_HOST if self.switch else "127.0.0.1"
        self.coordinator = start_coordinator(self.folder, train, scenario.num_shards, scenario.per_shard, host)

    def _coordinator_address(self) -> str:
        self._await(lambda: coordinator_address(self.folder), "the coordinator does not listen")
        return coordinator_address(self.folder)

    def _start_learner(self, number: int, coordinator: str) -> None:
        scenario = self.scenario
        node, rank = divmod(number, scenario.ranks)
        machine = number if scenario.apart else node
        exchange = TrainConfig().exchange.model_copy(
            update={
                "wire": scenario.wire,
                "encrypt": scenario.encrypt or self.switch is not None,
            }
        )
        setup = Setup(
            node=node,
            rank=rank,
            nodes=scenario.nodes,
            ranks=scenario.ranks,
            params=scenario.params,
            step_s=scenario.step_s * (scenario.slow if number == scenario.learners - 1 else 1.0),
            batch=scenario.batch,
            shard=self.shard,
            exchange=exchange,
            gossip=GossipConfig.model_validate({"neighbours": scenario.neighbours}),
            coordinator=coordinator,
            key=self.folder / "ring.key",
            folder=self.folder,
            host=netns.address(machine) if self.switch else "127.0.0.1",
            namespace=self.switch.machines[machine] if self.switch else None,
            apart=scenario.apart,
        )
        learner = _FORK.Process(target=run, args=(setup, self.boards[number], self.start, os.getpid()))
        learner.start()
        self.learners.append(learner)

    def _await(self, done: Any, what: str) -> None:
        deadline = time.monotonic() + START_S
        while not done():
            self._check()
            if time.monotonic() > deadline:
                raise RunError(f"{what} after {START_S:.0f} s:\n{self._logs()}")
            time.sleep(0.05)

    def _check(self) -> None:
        if any(learner.exitcode is not None for learner in self.learners) or (
            self.coordinator and self.coordinator.poll()
        ):
            raise RunError(f"a process has ended:\n{self._logs()}")

    def _logs(self) -> str:
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(line for text in texts for line in text.splitlines()[-15:])[-4000:]

    # --- measuring

    def measure(self) -> Measured:
        scenario = self.scenario
        self.start.set()
        began = self.began = time.monotonic()
        # a step of a synchronous strategy takes as long as that of its slowest learner
        step = scenario.step_s * (scenario.slow if scenario.strategy == "scpsgd" else 1.0)
        self._watch(began + max(1.0, 2 * step))
        window, machine, own = time.monotonic(), machine_cpu(), tree_cpu(os.getpid())
        sent, steps = self._sent(), self._steps()
        self._watch(window + max(scenario.seconds, 2.5 * step))
        wanted = scenario.closings if scenario.strategy != "scpsgd" or scenario.slow == 1.0 else 0
        while len(self.closed) < wanted and time.monotonic() < window + scenario.limit_s:
            self._watch(time.monotonic() + 0.2)
        end, later = time.monotonic(), machine_cpu()
        cores = os.cpu_count() or 1
        used = (tree_cpu(os.getpid()) - own) / ((end - window) * cores)
        result = self._result(window, end, (later[0] - machine[0]) / max(later[1] - machine[1], 1e-9), used)
        return replace(result, bytes_per_step=(self._sent() - sent) / max(1, self._steps() - steps))

    def _sent(self) -> int:
        return sum(map(netns.sent_bytes, self.switch.machines)) if self.switch else 0

    def _steps(self) -> int:
        return sum(len(board.stamps()) for board in self.boards)

    def _watch(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self._check()
            self._look_at_journal()
            time.sleep(min(left, 0.1))

    def _look_at_journal(self) -> None:
        path = self.folder / "journal"
        if path.exists():
            self._journal = path.read_text(encoding="utf-8")
        self.closed += [time.monotonic()] * (len(self._epochs()) - len(self.closed))

    def _epochs(self) -> list[dict[str, Any]]:
        whole = self._journal[: self._journal.rfind("\n") + 1].splitlines()
        return [entry for entry in map(json.loads, whole) if entry["kind"] == "epoch"]

    def _result(self, window: float, end: float, cpu_share: float, own_share: float) -> Measured:
        rates = [rate(board.stamps(), window, end) for board in self.boards]
        epochs, facts = self._epochs(), [board.facts() for board in self.boards]
        took = [fact["mean_s"] for fact in facts if fact["mean_s"] > 0]
        size = len(self.shard)
        return Measured(
            steps_per_s=rates,
            utterances_per_s=sum(rates) * self.scenario.batch,
            epoch_s=(self.closed[-1] - self.began) / len(self.closed) if self.closed else None,
            closings=len(epochs),
            index=size,
            accounted=all(entry["utterances"] == entry["index"] == size and not entry["repeated"] for entry in epochs),
            cpu_share=cpu_share,
            own_share=own_share,
            exchanges_per_step=sum(fact["initiated"] for fact in facts) / max(self._steps(), 1),
            exchange_s=float(np.mean(took)) if took else 0.0,
            failed=int(sum(fact["failed"] for fact in facts)),
            seconds=end - window,
            staleness=[fact["staleness"] for fact in facts],
        )
