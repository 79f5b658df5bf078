"""Leases in a simulation: batches are leased one by one, so that a fast learner takes more."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchLease:
    """A batch that is leased to a learner.

    Attributes:
        number: Number of the batch within its epoch.
        epoch: Number of the epoch.
    """

    number: int
    epoch: int


class LeasePool:
    """The batches of all epochs, each to be trained on once.

    Attributes:
        trained: Number of finished batches.
        repeated: Number of batches that were returned because a learner died.
    """

    def __init__(self, batches: int, epochs: int) -> None:
        self.batches, self.epochs = batches, epochs
        self.trained = self.repeated = 0
        self._given = 0
        self._returned: deque[BatchLease] = deque()
        self._underway: set[BatchLease] = set()

    @property
    def total(self) -> int:
        """Number of batches over all epochs."""
        return self.batches * self.epochs

    @property
    def progress(self) -> float:
        """Epochs trained, fractions included."""
        return self.trained / self.batches

    @property
    def over(self) -> bool:
        """Whether all batches are finished."""
        return self.trained == self.total

    def take(self) -> BatchLease | None:
        """Lease the next batch; None if there is none at present."""
        if self._returned:
            lease = self._returned.popleft()
        elif self._given < self.total:
            epoch, number = divmod(self._given, self.batches)
            lease, self._given = BatchLease(number, epoch), self._given + 1
        else:
            return None
        self._underway.add(lease)
        return lease

    def finish(self, lease: BatchLease) -> None:
        """Mark a batch as trained."""
        self._underway.remove(lease)
        self.trained += 1

    def give_back(self, lease: BatchLease) -> None:
        """Return a batch to the pool, because its learner will not finish it."""
        self._underway.remove(lease)
        self._returned.append(lease)
        self.repeated += 1
