"""Virtual time: events happen in the order of their times, and at the same time in the order of their making."""

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """Seconds that pass only from event to event.

    Attributes:
        now: The time of the event that happens at present, seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Have something happen at a time, not before now.

        Raises:
            ValueError: The time is no finite number.
        """
        if not math.isfinite(time):
            raise ValueError(f"an event at {time} s will never happen: look at the cluster's links and step times")
        heapq.heappush(self._events, (max(time, self.now), next(self._number), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have something happen after some seconds."""
        self.at(self.now + seconds, event)

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True
