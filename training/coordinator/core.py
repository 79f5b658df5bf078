"""What the parts of the coordinator share: job, ledger, clocks, and the events of the request under way."""

import math
import time
from collections.abc import Callable

from storage.objects import ObjectStore
from training.coordinator.ledger import Event, Ledger
from training.coordinator.messages import COUNTS, CoordinatorError, Message, unpack_rows
from training.coordinator.settings import Settings


class Core:
    """Shared state; whatever changes the ledger goes through `do`.

    Args:
        settings: The job.
        ledger: The state; empty, or as the log gave it.
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
        """Whether the log should take over the state as a whole."""
        self._events: list[Event] = []

    def do(self, event: str, **values: object) -> object:
        """Change the ledger by an event; returns what the event gives."""
        body = {"event": event, **values}
        result = self.ledger.apply(body)
        self._events.append(body)
        return result

    def set(self, **values: object) -> None:
        """Change some of the ledger's plain values."""
        self.do("value", values=values)

    def note_elapsed(self, seconds: float) -> None:
        """Add to the time of training."""
        self.set(elapsed=self.ledger.values.elapsed + seconds, at=self.wall())

    def drain(self) -> tuple[list[Event], list[Message]]:
        """Events and journal lines since the last call, to be committed."""
        found = self._events, self.ledger.lines
        self._events, self.ledger.lines = [], []
        return found

    def check_report(self, entry: Message) -> int:
        """Number of rows that a node reports as trained, after a look at whether the report can be.

        Raises:
            CoordinatorError: If it cannot.
        """
        counts = entry["counts"]
        if int(entry["seq"]) < 1 or not all(math.isfinite(counts[name]) for name in COUNTS):
            raise CoordinatorError("a report's counts are not finite numbers")
        return self.check_rows(entry)

    @staticmethod
    def check_record(record: Message) -> None:
        """See that a checkpoint's record says whose it is, and what its weights contain.

        Raises:
            CoordinatorError: If it does not.
        """
        if not all(isinstance(record.get(name), int) and record[name] >= 0 for name in ("node", "step", "seq")):
            raise CoordinatorError("a checkpoint's record needs node, step and seq, whole numbers")

    def check_rows(self, entry: Message) -> int:
        """Number of rows that a node names, after a look at whether they can be.

        Raises:
            CoordinatorError: If epoch or rows do not exist.
        """
        rows = unpack_rows(entry["rows"])
        if not 0 <= int(entry["epoch"]) < self.ledger.total:
            raise CoordinatorError(f"epoch {entry['epoch']} is not one of {self.ledger.total}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.ledger.size:
            raise CoordinatorError(
                f"rows beyond the index of {self.ledger.size} utterances: has the node another index?"
            )
        return len(rows)
