"""The process from which a system's learners are forked, so that torch and the system are imported only once.

It has a separate network namespace if permitted (`benchmarks.netns`), so that the traffic on its loopback interface is
the system's. Orders and answers are lines of JSON on standard input and output. It ends with its parent process, and
all its children end with it.
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import netns
from benchmarks.board import Board
from benchmarks.peers.base import MissingError, Setup, System, find
from benchmarks.peers.emulation import SAMPLES, EmulatedModel, sample
from benchmarks.scaling_probes import descendants
from training.processes.children import adopt_orphans, end_with_parent

GO_S = 300.0
"""Maximum seconds that a ready learner waits for the start."""
_FORK = multiprocessing.get_context("fork")


def open_board(folder: Path, number: int) -> Board:
    """A learner's board; its `extra` contains the start flag and a sample of the weights."""
    return Board(folder / f"board-{number}", 1 + SAMPLES)


def _learn(system: type[System], setup: Setup, board: Board) -> None:
    model = EmulatedModel(setup.params, setup.step_s * setup.slow, seed=setup.number + setup.learners * setup.joining)
    learner = system(setup, model)
    board.set_ready()
    deadline = time.monotonic() + GO_S
    while not board.extra[0]:
        if time.monotonic() > deadline:
            raise TimeoutError("this learner has not received the signal to start")
        time.sleep(0.002)
    while True:
        if learner.step():
            board.extra[1:] = sample(list(learner.weights())).numpy()
            board.step()


def _begin(work: Callable[[], None], log: Path, parent: int) -> None:
    """Run a forked process in its own session, logging to a file."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent, signal.SIGKILL)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", force=True)
    torch.set_num_threads(1)
    try:
        work()
    except BaseException:
        logging.exception("this process has failed")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


class Stage:
    """Starts and ends processes of one system."""

    def __init__(self, system: type[System]) -> None:
        self.system = system
        # by process number
        self.started: dict[int, Any] = {}

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute an order and return the answer."""
        if order["do"] == "clear":
            self.clear()
            return {}
        if order["do"] == "kill":
            _kill({order["pid"], *descendants(order["pid"])})
            return {}
        setup = Setup(**{**order["setup"], "folder": Path(order["setup"]["folder"]), "ports": order["setup"]["ports"]})
        if order["do"] == "serve":
            return {"pid": self._start(lambda: self.system.serve(setup), setup.folder / "service.log")}
        board = open_board(setup.folder, setup.number)
        return {"pid": self._start(lambda: _learn(self.system, setup, board), setup.folder / f"{setup.number}.log")}

    def _start(self, work: Callable[[], None], log: Path) -> int:
        process = _FORK.Process(target=_begin, args=(work, log, os.getpid()))
        process.start()
        assert process.pid is not None
        self.started[process.pid] = process
        return process.pid

    def clear(self) -> None:
        """Kill all descendants of this process."""
        deadline = time.monotonic() + 10.0
        while (family := descendants(os.getpid())) and time.monotonic() < deadline:
            _kill(family)
            self._reap()
            time.sleep(0.02)
        self._reap()
        for process in self.started.values():
            process.join(0.0)
        self.started.clear()

    def _reap(self) -> None:
        """Reap children, including adopted orphans of learners."""
        for process in self.started.values():
            process.join(0.0)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _kill(family: set[int]) -> None:
    for number in family:
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _alone() -> bool:
    """Move into a separate network namespace; returns whether that is possible."""
    try:
        netns.alone()
    except netns.NamespaceError:
        return False
    return True


def _warm_up() -> None:
    """Trigger torch's lazy imports of the first optimizer step, which would take seconds in each learner."""
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Execute orders from standard input until it ends."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers.stage", description=__doc__)
    parser.add_argument("system")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--sgp", type=Path)
    options = parser.parse_args()
    # only answers go to standard output; redirect prints of libraries to standard error
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    end_with_parent(options.parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    adopt_orphans()
    stage = Stage(find(options.system))
    try:
        own_network = _alone()
        try:
            stage.system.prepare(options.sgp)
        except MissingError as error:
            answers.write(json.dumps({"missing": str(error)}) + "\n")
            return
        _warm_up()
        answers.write(json.dumps({"own_network": own_network}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(stage.obey(json.loads(line))) + "\n")
    finally:
        stage.clear()


if __name__ == "__main__":
    main()
