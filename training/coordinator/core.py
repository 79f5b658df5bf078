"""State shared by the parts of the coordinator: job, ledger, clocks, and the events of the current request."""

import math
import time
from collections.abc import Callable

from storage.objects import ObjectStore
from training.coordinator.ledger import Event, Ledger
from training.coordinator.messages import COUNTS, CoordinatorError, Message, unpack_rows
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
        body = {"event": event, **values}
        result = self.ledger.apply(body)
        self._events.append(body)
        return result

    def set(self, **values: object) -> None:
        """Change some of the ledger's counters."""
        self.do("value", values=values)

    def note_elapsed(self, seconds: float) -> None:
        """Add to the training time."""
        self.set(elapsed=self.ledger.values.elapsed + seconds, at=self.wall())

    def drain(self) -> tuple[list[Event], list[Message]]:
        """Take the events and journal lines since the last call, to be committed."""
        found = self._events, self.ledger.lines
        self._events, self.ledger.lines = [], []
        return found

    def check_report(self, entry: Message) -> int:
        """Validate a node's training report and return its number of rows.

        Raises:
            CoordinatorError: If the report is invalid.
        """
        counts = entry["counts"]
        if int(entry["seq"]) < 1 or not all(math.isfinite(counts[name]) for name in COUNTS):
            raise CoordinatorError("a report's counts are not finite numbers")
        return self.check_rows(entry)

    @staticmethod
    def check_record(record: Message) -> None:
        """Check that a checkpoint record names its node, its step and its last report.

        Raises:
            CoordinatorError: If one is missing or not a whole number.
        """
        if not all(isinstance(record.get(name), int) and record[name] >= 0 for name in ("node", "step", "seq")):
            raise CoordinatorError("a checkpoint record needs node, step and seq as whole numbers")

    def check_rows(self, entry: Message) -> int:
        """Validate the epoch and rows that a node names and return the number of rows.

        Raises:
            CoordinatorError: If epoch or rows do not exist.
        """
        rows = unpack_rows(entry["rows"])
        if not 0 <= int(entry["epoch"]) < self.ledger.total:
            raise CoordinatorError(f"epoch {entry['epoch']} is not one of {self.ledger.total}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.ledger.size:
            raise CoordinatorError(
                f"rows beyond the index of {self.ledger.size} utterances: does the node use another index?"
            )
        return len(rows)
