"""Copies of the training process into and out of shared memory; for weights on a GPU see `device_mover`."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from training.exchange.mailbox import Mailbox

HAND_OVER_S = 0.004
"""How long an update may wait for the local daemon to hand over a delta; usually a tenth of a millisecond is enough.
Without an answer the update proceeds, and later updates do not wait until the daemon has answered."""


class Mover(ABC):
    """The training process's copies to and from a mailbox.

    Args:
        mailbox: Shared with the exchange.
        wake: Notifies the exchange of changes; never waits.

    Attributes:
        generation: Generation of the weights that are given from now on.
        oldest: Training step of the oldest weights from which `take`'s delta was computed.
    """

    def __init__(self, mailbox: Mailbox, wake: Callable[[], None]) -> None:
        self._mailbox, self._wake = mailbox, wake
        self.generation = 0
        self.oldest = 0

    def restart(self) -> None:
        """Prepare for replaced weights: averages with the old ones are dropped."""
        self.generation += 1

    @abstractmethod
    def give(self, weights: torch.Tensor, step: int) -> bool:
        """Offer weights; False if earlier ones are still being transferred."""

    def update_begins(self) -> None:  # noqa: B027 - only needed if copies take time
        """Called before an update; until it returns, neighbours may still average with the old weights."""

    @abstractmethod
    def ready(self) -> bool:
        """Collect everything averaged until now; returns whether there is a delta."""

    @abstractmethod
    def take(self) -> torch.Tensor:
        """The delta, after `ready` has returned True; valid until `release`."""

    @abstractmethod
    def release(self) -> None:
        """Signal that the weights that are given from now on contain the delta."""

    @abstractmethod
    def close(self) -> None:
        """Finish all copies and release the memory."""

    def _outdated(self) -> bool:
        """Whether the waiting delta belongs to weights from before `restart`; if so, it is released."""
        mailbox = self._mailbox
        if mailbox.delta_generation == self.generation:
            return False
        mailbox.released = mailbox.offered
        self._wake()
        return True


class HostMover(Mover):
    """The mover for weights in main memory."""

    def __init__(self, mailbox: Mailbox, wake: Callable[[], None]) -> None:
        super().__init__(mailbox, wake)
        self._deltas = [torch.from_numpy(part) for part in mailbox.deltas]
        self._taken = 0

    def restart(self) -> None:
        """Mark the waiting delta, which belongs to the old weights, as taken."""
        super().restart()
        self._taken = self._mailbox.offered

    def give(self, weights: torch.Tensor, step: int) -> bool:
        """Copy the weights into the free slot; False if the exchange has not read the last snapshot."""
        slot = self._mailbox.snapshot_slot()
        if slot is None:
            return False
        torch.from_numpy(slot).copy_(weights.detach())
        self._mailbox.newest = step
        self._mailbox.send_snapshot(step, self._taken, self.generation)
        self._wake()
        return True

    def ready(self) -> bool:
        """Demand a delta; waits for the daemon for at most a few milliseconds, never for the network."""
        mailbox = self._mailbox
        if mailbox.demand():
            self._wake()
            until = time.monotonic() + HAND_OVER_S
            while not mailbox.met() and (left := until - time.monotonic()) > 0:
                mailbox.bell.listen(left)
        if not mailbox.delta_waits() or self._outdated():
            return False
        self.oldest = mailbox.delta_step
        return True

    def take(self) -> torch.Tensor:
        """The delta in shared memory."""
        self._taken = self._mailbox.offered
        return self._deltas[self._taken % 2]

    def release(self) -> None:
        """Return the delta's memory to the exchange."""
        mailbox = self._mailbox
        if self._taken == mailbox.offered and mailbox.delta_waits():
            mailbox.released = self._taken
            self._wake()

    def close(self) -> None:
        """Release the shared memory."""
        self._deltas.clear()
