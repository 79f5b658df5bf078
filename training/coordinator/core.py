"""State shared by the parts of the coordinator: job, ledger, clocks, and the events of the current request."""

import time
from collections.abc import Callable

from storage.objects import ObjectStore
from training.coordinator.ledger import Event, Ledger
from training.coordinator.messages import CoordinatorError, JsonObject
from training.coordinator.packing import unpack_rows
from training.coordinator.settings import Settings


class Core:
    """Shared state; every change of the ledger goes through `do`.

    Args:
        settings: The job.
        ledger: The state; empty, or restored from the event log.
        output: The training's output.
        clock: Monotonic seconds.
        wall: Seconds since the epoch.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        output: ObjectStore,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings, self.ledger, self.output = settings, ledger, output
        self.clock, self.wall = clock, wall
        self.compact = False
        """Whether the event log should be compacted into one state."""
        self._events: list[Event] = []

    def do(self, event: str, **values: object) -> object:
        """Apply an event to the ledger and return its result."""
        body, lines = {"event": event, **values}, len(self.ledger.lines)
        try:
            result = self.ledger.apply(body)
        except Exception:
            del self.ledger.lines[lines:]  # of an event that is not recorded
            raise
        self._events.append(body)
        return result

    def set(self, **values: object) -> None:
        """Change some of the ledger's counters."""
        self.do("value", values=values)

    def note_elapsed(self, seconds: float) -> None:
        """Add to the training time."""
        self.set(elapsed=self.ledger.values.elapsed + seconds, at=self.wall())

    def drain(self) -> tuple[list[Event], list[JsonObject]]:
        """Take the events and journal lines since the last call, to be committed."""
        found = self._events, self.ledger.lines
        self._events, self.ledger.lines = [], []
        return found

    def check_rows(self, epoch: int, packed: str) -> int:
        """Validate the epoch and rows that a node names and return the number of rows.

        Raises:
            CoordinatorError: If epoch or rows do not exist.
        """
        rows = unpack_rows(packed)
        if not 0 <= epoch < self.ledger.total:
            raise CoordinatorError(f"epoch {epoch} is not one of {self.ledger.total}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.ledger.size:
            raise CoordinatorError(
                f"rows beyond the index of {self.ledger.size} utterances: does the node use another index?"
            )
        return len(rows)
