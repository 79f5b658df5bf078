"""Helpers of the benchmarks: interleaved timing of alternatives, tables of ratios, ring views, watched processes."""

import json
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from training.coordinator.membership import Member, View

T = TypeVar("T")


class BenchmarkError(RuntimeError):
    """A process has died or does not answer, so there is no result."""


def compare(
    rivals: dict[str, Callable[[], object]], rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each alternative; they run in turns, so that load on the machine affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for work in rivals.values():
        work()  # warm up caches and lazy imports
    for _ in range(rounds):
        for name, work in rivals.items():
            started = clock()
            work()
            times[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def show(title: str, seconds: dict[str, float], ours: str, unit: str, amount: float) -> None:
    """Print a table with ratios to our own entry, and the same data as one JSON line."""
    print(title)
    for name, value in seconds.items():
        ratio = seconds[ours] / value
        print(f"  {name:38} {amount / value:12,.1f} {unit:24} x {ratio:5.2f} of {ours}")
    rows = [{"name": name, "median_s": value, unit: amount / value} for name, value in seconds.items()]
    print(json.dumps({"benchmark": title, "rows": rows}))


def _waitables(pipe: Connection, process: BaseProcess) -> tuple[Connection, int]:
    """The objects to wait for: a message from a process, or its end."""
    return pipe, process.sentinel


def _receive(number: int, pipe: Connection, process: BaseProcess) -> list[Any]:
    """Receive at most one message of a process, without waiting.

    Raises:
        BenchmarkError: The process has ended.
    """
    dead = process.exitcode is not None
    try:
        if pipe.poll():
            return [pipe.recv()]
    except (EOFError, OSError):
        dead = True
    if dead:
        process.join(5.0)
        raise BenchmarkError(f"process {number} has ended with status {process.exitcode}; see its traceback above")
    return []


class Watched:
    """Processes of one measurement; the death of one ends the benchmark.

    Args:
        work: Function that each process runs: `work(number, options, pipe, parent)`; it sends messages through the
            pipe.
        count: Number of processes.
        options: Options of the measurement.
        patience_s: Time-out of each answer in seconds.
        parents: Whether the processes start processes themselves.
    """

    def __init__(
        self,
        work: Callable[[int, T, Connection, int], None],
        count: int,
        options: T,
        patience_s: float,
        parents: bool = False,
    ) -> None:
        self._patience_s = patience_s
        context = mp.get_context("spawn")
        self._members: list[tuple[Connection, BaseProcess]] = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(number, options, theirs, os.getpid()), daemon=not parents)
            process.start()
            theirs.close()
            self._members.append((ours, process))

    def hear(self) -> list[Any]:
        """Receive the next message of each process.

        Raises:
            BenchmarkError: A process has died or does not answer.
        """
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._patience_s
        while len(answers) < len(self._members):
            if time.monotonic() > deadline:
                silent = next(n for n in range(len(self._members)) if n not in answers)
                raise BenchmarkError(f"process {silent} has not answered for {self._patience_s:.0f} s")
            for number, (pipe, process) in enumerate(self._members):
                # watch all processes while waiting for one
                if number not in answers and (new := _receive(number, pipe, process)):
                    answers[number] = new[0]
            waiting = [end for n, member in enumerate(self._members) if n not in answers for end in _waitables(*member)]
            if waiting:
                wait(waiting, 1.0)
        return [answers[number] for number in range(len(self._members))]

    def tell(self, message: Any) -> None:
        """Send a message to all processes."""
        for pipe, _ in self._members:
            pipe.send(message)

    def end(self, patience_s: float = 0.0) -> None:
        """End all processes and their children."""
        for _, process in self._members:
            process.join(patience_s)
        for _, process in self._members:
            if process.is_alive():
                process.terminate()
                process.join(8.0)
            if process.is_alive():
                process.kill()
                process.join()


def view_of(endpoints: Sequence[str]) -> View:
    """A view of nodes with one learner each, whose exchanges have these endpoints."""
    return View(1, tuple(Member(node, str(node), (endpoint,)) for node, endpoint in enumerate(endpoints)))
