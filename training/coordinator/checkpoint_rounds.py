"""Checkpoint rounds: which nodes were asked to write their part, and which have answered."""

from dataclasses import dataclass, field

from storage.objects import ObjectStore
from training.coordinator.checkpoints import Publisher, make_document
from training.coordinator.ledger import Ledger
from training.coordinator.messages import JsonObject
from training.coordinator.settings import Settings

PATIENCE_S = 120.0
"""A node that does not answer within this time is left out of the checkpoint."""


@dataclass
class CheckpointRound:
    """One checkpoint in the making.

    Attributes:
        number: The checkpoint's number.
        waiting: Incarnations that have not answered.
        records: Records of the nodes that have written their part, by incarnation.
        deadline: Monotonic time after which missing answers are left out.
        publishing: Whether it was handed to the publisher.
    """

    number: int
    waiting: set[str]
    deadline: float
    records: dict[str, JsonObject] = field(default_factory=dict)
    publishing: bool = False


class CheckpointRounds:
    """Starts checkpoints and publishes them, one at a time.

    Args:
        settings: The job.
        ledger: The state.
        output: The training's output.
    """

    def __init__(self, settings: Settings, ledger: Ledger, output: ObjectStore) -> None:
        self.settings, self.ledger = settings, ledger
        self.publisher = Publisher(output, settings.checkpoint_keep)
        self.current: CheckpointRound | None = None
        self.reset()

    def reset(self) -> None:
        """Abandon the current round, after a change of session or a start of the coordinator."""
        self.current = None
        self.ledger.accepted = None
        self._steps, self._closed = self.ledger.totals.steps, self.ledger.values.closed

    @property
    def fresh(self) -> bool:
        """Whether nothing was trained since the last checkpoint was started."""
        return self._steps == self.ledger.totals.steps

    def due(self) -> bool:
        """Whether to start a checkpoint: after enough steps, or because an epoch has closed."""
        if self.current is not None or self.fresh:
            return False
        steps = self.ledger.totals.steps - self._steps
        enough = steps >= self.settings.checkpoint_steps * max(1, len(self.ledger.states))
        return enough or self.ledger.values.closed > self._closed

    def begin(self, number: int, now: float) -> None:
        """Start a checkpoint: ask all members that have weights."""
        waiting = {name for name, state in self.ledger.states.items() if state.ready}
        self.current = CheckpointRound(number, waiting, now + PATIENCE_S)
        self.ledger.accepted = []
        self._steps, self._closed = self.ledger.totals.steps, self.ledger.values.closed

    def asked(self, incarnation: str) -> int | None:
        """Number of the checkpoint that a member must still write, or None."""
        current = self.current
        return current.number if current is not None and incarnation in current.waiting else None

    def answer(self, incarnation: str, number: int, record: JsonObject) -> None:
        """Record that a member has written its part."""
        current = self.current
        if current is None or current.number != number or incarnation not in current.waiting:
            return
        current.waiting.discard(incarnation)
        current.records[incarnation] = record

    def tick(self, now: float) -> None:
        """Publish the round once it is complete; leave out nodes that have left or are too late."""
        for number, _ in self.publisher.finished():
            if self.current is not None and self.current.number == number:
                self.current = None
        current = self.current
        if current is None or current.publishing:
            return
        current.waiting &= self.ledger.states.keys()
        if current.waiting and now < current.deadline:
            return
        if not current.records:
            self.current, self.ledger.accepted = None, None
            return
        document = make_document(self.ledger, self.settings.run, self.settings.nodes, current.records)
        self.ledger.accepted = None
        current.publishing = True
        self.publisher.publish(current.number, document)
