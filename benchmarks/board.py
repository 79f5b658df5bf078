"""Progress of a benchmark's learner in shared memory, readable even if the learner is killed."""

import mmap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from training.exchange import Exchange

_FACTS = 10
_CAPACITY = 100_000
"""Maximum number of steps on a board."""


class Board:
    """A learner's readiness, the end time of each step, and the exchange's figures.

    Args:
        file: Processes that open this file share the board; without a file, forked children share it.
        extra: Number of additional values.

    Attributes:
        extra: The additional values [extra].
    """

    def __init__(self, file: Path | None = None, extra: int = 0) -> None:
        size = 8 * (_FACTS + extra + _CAPACITY)
        if file is None:
            memory = mmap.mmap(-1, size)
        else:
            with file.open("a+b") as opened:
                opened.truncate(size)
                memory = mmap.mmap(opened.fileno(), size)
        self._values: NDArray[np.float64] = np.frombuffer(memory, dtype=np.float64)
        self.extra = self._values[_FACTS : _FACTS + extra]
        self._stamps = self._values[_FACTS + extra :]

    @property
    def ready(self) -> bool:
        """Whether the learner waits for the start."""
        return bool(self._values[1])

    def set_ready(self) -> None:
        """Mark the learner as waiting for the start."""
        self._values[1] = 1

    def step(self) -> None:
        """Record the end of a step."""
        number = int(self._values[0])
        if number < _CAPACITY:
            self._stamps[number] = time.monotonic()
            self._values[0] = number + 1

    def note(self, exchange: "Exchange") -> None:
        """Record the exchange's figures."""
        stats = exchange.stats()
        facts = (stats.initiated, stats.answered, stats.failed, stats.mean_s, stats.staleness, stats.distance)
        self._values[2 : 2 + len(facts)] = facts

    def facts(self) -> dict[str, float]:
        """The exchange's figures."""
        names = ("initiated", "answered", "failed", "mean_s", "staleness", "distance")
        return dict(zip(names, self._values[2 : 2 + len(names)].tolist(), strict=True))

    def stamps(self) -> NDArray[np.float64]:
        """End times of the steps (monotonic clock)."""
        return self._stamps[: int(self._values[0])].copy()
