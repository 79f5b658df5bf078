"""The training process's copies into shared memory and out of it; see `device_mover` for weights on a GPU."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from training.exchange.mailbox import Mailbox

HAND_OVER_S = 0.004
"""How long an update may wait for the daemon on the same machine to hand over what it has averaged; usually a tenth of
a millisecond will do. Without an answer the update goes on, and does not wait again before the daemon has answered."""


class Mover(ABC):
    """The training process's copies to and from a mailbox.

    Args:
        mailbox: Shared with the exchange.
        wake: Tells the exchange that there is news; never waits.

    Attributes:
        generation: Of the weights that are given from now on.
        oldest: Training step of the oldest weights that `take`'s delta was computed from.
    """

    def __init__(self, mailbox: Mailbox, wake: Callable[[], None]) -> None:
        self._mailbox, self._wake = mailbox, wake
        self.generation = 0
        self.oldest = 0

    def restart(self) -> None:
        """Other weights come: what was averaged with the old ones is dropped."""
        self.generation += 1

    @abstractmethod
    def give(self, weights: torch.Tensor, step: int) -> bool:
        """Offer weights; False if earlier ones are still under way."""

    def update_begins(self) -> None:  # noqa: B027 - only where averages take their time
        """The training process is about to change its weights."""

    @abstractmethod
    def ready(self) -> bool:
        """Get everything that has been averaged until now; whether there is anything."""

    @abstractmethod
    def take(self) -> torch.Tensor:
        """The delta, if `ready` has said that there is one; valid until `release`."""

    @abstractmethod
    def release(self) -> None:
        """The delta has been added to the weights that are given from now on."""

    @abstractmethod
    def close(self) -> None:
        """End all copies and let go of the memory."""

    def _outdated(self) -> bool:
        """Whether the delta that waits is of weights from before `restart`: then it is given back."""
        mailbox = self._mailbox
        if mailbox.delta_generation == self.generation:
            return False
        mailbox.released = mailbox.offered
        self._wake()
        return True


class HostMover(Mover):
    """Copies within main memory."""

    def __init__(self, mailbox: Mailbox, wake: Callable[[], None]) -> None:
        super().__init__(mailbox, wake)
        self._deltas = [torch.from_numpy(part) for part in mailbox.deltas]
        self._taken = 0

    def restart(self) -> None:
        """Count the delta that waits, which is of the old weights, as taken."""
        super().restart()
        self._taken = self._mailbox.offered

    def give(self, weights: torch.Tensor, step: int) -> bool:
        """Copy the weights into the free snapshot; False if the exchange has not read the last one."""
        slot = self._mailbox.snapshot_slot()
        if slot is None:
            return False
        torch.from_numpy(slot).copy_(weights.detach())
        self._mailbox.newest = step
        self._mailbox.send_snapshot(step, self._taken, self.generation)
        self._wake()
        return True

    def ready(self) -> bool:
        """Demand a delta; waits for the daemon for a few milliseconds at most, for the network never."""
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
        """Give the delta's memory back to the exchange."""
        mailbox = self._mailbox
        if self._taken == mailbox.offered and mailbox.delta_waits():
            mailbox.released = self._taken
            self._wake()

    def close(self) -> None:
        """Let go of the shared memory."""
        self._deltas.clear()
