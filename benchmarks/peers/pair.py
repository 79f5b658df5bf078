"""A run of a pair: Starling and another system train concurrently, with the same measurements of both."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import BenchmarkError
from benchmarks.peers.side import Counters, Scenario, Side, wait_until
from benchmarks.scaling_probes import machine_cpu

START_S = 120.0
FIRST_STEP_S = 60.0
"""Maximum wait for the learners' first steps; a system without a step by then is measured nevertheless."""
_LOOK_S = 0.25
"""Seconds between two samples of the replicas' distance."""
_SLOW_STEPS = 4
"""Minimum steps of a slow learner in a window: some systems wait for it only every few steps."""
_LATE = 1.5
"""A step that takes longer than the previous one by this factor counts as stalled."""
STOPPED = 0.1
"""Survivors below this share of their previous pace count as stopped."""


@dataclass(frozen=True)
class Times:
    """Durations of the measurement.

    Attributes:
        warm_s: Seconds between the first step and the measurement.
        window_s: Seconds per window.
        windows: Number of windows; figures are medians over them.
        kill_s: Seconds of watching the survivors.
        join_s: Maximum seconds until a newcomer's first step.
    """

    warm_s: float = 2.0
    window_s: float = 3.0
    windows: int = 3
    kill_s: float = 12.0
    join_s: float = 20.0

    def fit(self, scenario: Scenario) -> "Times":
        """Use longer and fewer windows if a slow learner makes too few steps in one."""
        least = _SLOW_STEPS * scenario.step_s * scenario.slow
        if self.window_s >= least:
            return self
        windows = max(1, round(self.windows * self.window_s / least))
        return Times(self.warm_s, least, windows, self.kill_s, self.join_s)


@dataclass
class Figures:
    """Measurements of one system.

    Attributes:
        steps_per_s: Median over learners that are not slow, for each window.
        cpu_ms: CPU milliseconds of all its processes per step of a learner, for each window.
        mb: Megabytes on the network per step, for each window; empty if unknown.
        distance: Replicas' distance from their mean, in steps.
        kept: Survivors' pace after a kill, relative to their pace before; None without a kill.
        pause_s: The survivors' longest pause after the kill.
        ended: Survivors whose process has ended.
        joined_s: Seconds until a newcomer's first step; None without one, or if it was not in time.
        pace_joined: The survivors' pace with the newcomer, relative to their pace before the kill.
    """

    steps_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    mb: list[float] = field(default_factory=list)
    distance: float = 0.0
    kept: float | None = None
    pause_s: float | None = None
    ended: int = 0
    joined_s: float | None = None
    pace_joined: float | None = None


@dataclass(frozen=True)
class Measured:
    """Figures of a pair, and the machine's CPU load during the measurement."""

    ours: Figures
    theirs: Figures
    cpu_share: float


def measure(
    sides: Sequence[Side], scenario: Scenario, times: Times, number: int, exchange: Mapping[str, str]
) -> Measured:
    """Run a scenario on two systems concurrently.

    Args:
        sides: Starling and the other system.
        scenario: The scenario.
        times: Durations of the measurement.
        number: Number of the run.
        exchange: Fields of Starling's `train.exchange` and `train.strategy`.

    Raises:
        BenchmarkError: Learners ended or did not get ready.
    """
    times = times.fit(scenario)
    try:
        for side in sides:
            side.start(scenario, number, exchange)
        if not wait_until(lambda: all(side.ready() for side in sides), START_S):
            late = ", ".join(f"{side.name}:\n{side.log()}" for side in sides if not side.ready())
            raise BenchmarkError(f"after {START_S:.0f} s learners are not ready: {late}")
        for side in sides:
            side.go()
        # the first step takes longer (connections, page faults); do not wait for that of a slow learner
        wait_until(lambda: all(all(map(len, side.stamps()[:-1])) for side in sides), FIRST_STEP_S)
        time.sleep(times.warm_s)
        before = machine_cpu()
        measured = _windows(sides, scenario, times)
        after = machine_cpu()
        if scenario.kills:
            _kill(sides, measured, times)
    finally:
        for side in sides:
            side.clear()
    return Measured(measured[0], measured[1], (after[0] - before[0]) / max(after[1] - before[1], 1e-9))


def _windows(sides: Sequence[Side], scenario: Scenario, times: Times) -> list[Figures]:
    measured = [Figures() for _ in sides]
    apart: list[list[float]] = [[] for _ in sides]
    for _ in range(times.windows):
        began, before = time.monotonic(), [side.counters() for side in sides]
        while time.monotonic() < began + times.window_s:
            time.sleep(_LOOK_S)
            for side, distances in zip(sides, apart, strict=True):
                distances.append(side.distance())
        ended, after = time.monotonic(), [side.counters() for side in sides]
        for side, figures, old, new in zip(sides, measured, before, after, strict=True):
            figures.steps_per_s.append(pace(side, began, ended, slowed=scenario.slow > 1))
            _add_costs(figures, old, new)
    for side, figures, distances in zip(sides, measured, apart, strict=True):
        figures.distance = statistics.median(distances)
        figures.ended = sum(not side.alive(number) for number in range(scenario.learners))
        if figures.ended:
            raise BenchmarkError(f"learners of {side.name} have ended:\n{side.log()}")
    return measured


def _add_costs(figures: Figures, old: Counters, new: Counters) -> None:
    steps = new.steps - old.steps
    if steps > 0:
        figures.cpu_ms.append(1000 * (new.cpu_s - old.cpu_s) / steps)
        if old.sent is not None and new.sent is not None:
            figures.mb.append((new.sent - old.sent) / steps / 1e6)


def pace(side: Side, began: float, ended: float, slowed: bool) -> float:
    """Steps per second: the median over all learners but the last one, if that one is slow or dead."""
    stamps = side.stamps()
    chosen = stamps[:-1] if slowed else stamps
    return statistics.median(advance(learner_stamps, began, ended) / (ended - began) for learner_stamps in chosen)


def advance(stamps: NDArray[np.float64], began: float, ended: float) -> float:
    """Steps in a window; 0 if the step in progress at its start has not ended."""
    return max(0.0, progress(stamps, ended) - progress(stamps, began))


def progress(stamps: NDArray[np.float64], moment: float) -> float:
    """Number of steps completed at a time, including the fraction of the step in progress.

    Args:
        stamps: End times of the steps [steps], ascending.
        moment: The time; the fraction of a step that has not ended is estimated from the previous step's duration.
    """
    count = int(np.searchsorted(stamps, moment, side="right"))
    if count < 2 or (count == len(stamps) and moment - stamps[-1] > _LATE * (stamps[-1] - stamps[-2])):
        return float(count)
    end = stamps[count] if count < len(stamps) else 2 * stamps[-1] - stamps[-2]
    return count + min(1.0, (moment - stamps[count - 1]) / max(end - stamps[count - 1], 1e-9))


# --- killing and joining


def _kill(sides: Sequence[Side], measured: Sequence[Figures], times: Times) -> None:
    for side in sides:
        side.kill()
    killed = time.monotonic()
    time.sleep(times.kill_s)
    now = time.monotonic()
    for side, figures in zip(sides, measured, strict=True):
        survivors = side.stamps()[:-1]
        before = max(statistics.median(figures.steps_per_s), 1e-9)
        figures.kept = pace(side, now - times.kill_s / 3, now, slowed=True) / before
        figures.pause_s = max(longest_pause(learner_stamps.tolist(), killed, now) for learner_stamps in survivors)
        figures.ended = sum(not side.alive(number) for number in range(len(survivors)))
    joining = [
        (side, figures)
        for side, figures in zip(sides, measured, strict=True)
        if side.system.joins and not figures.ended and (figures.kept or 0.0) > STOPPED
    ]
    # measure Starling's newcomer only together with the other system's
    if len(joining) == len(sides):
        _join(joining, times)


def _join(joining: Sequence[tuple[Side, Figures]], times: Times) -> None:
    began = time.monotonic()
    for side, _ in joining:
        side.replace()
    wait_until(lambda: all(len(side.stamps()[-1]) for side, _ in joining), times.join_s)
    come = time.monotonic()
    time.sleep(times.window_s)
    now = time.monotonic()
    for side, figures in joining:
        if len(first := side.stamps()[-1]):
            figures.joined_s = float(first[0]) - began
            before = max(statistics.median(figures.steps_per_s), 1e-9)
            figures.pace_joined = pace(side, come, now, slowed=True) / before


def longest_pause(stamps: Sequence[float], began: float, ended: float) -> float:
    """Longest time between step ends within an interval, including its boundaries."""
    inside = [began, *(stamp for stamp in stamps if began < stamp < ended), ended]
    return max(later - earlier for earlier, later in pairwise(inside))
