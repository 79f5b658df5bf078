"""Virtual time: events run in the order of their times; events at the same time in the order of their creation."""

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """A virtual clock, which advances from event to event.

    Attributes:
        now: Time of the current event, seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Schedule an event at a time, or now if that has passed.

        Raises:
            ValueError: If the time is not finite.
        """
        if not math.isfinite(time):
            raise ValueError(f"an event at {time} s will never happen: look at the cluster's links and step times")
        heapq.heappush(self._events, (max(time, self.now), next(self._number), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event after some seconds."""
        self.at(self.now + seconds, event)

    def step(self) -> bool:
        """Run the next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True
