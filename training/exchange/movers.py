"""Copies of the training process into and out of shared memory."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from training.exchange.device import Copies, CopyEvent, Direction, Points
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


# --- weights on a device


_IDLE_S = 0.05
_MARGIN = 1.5  # in multiples of the mean copy time


class DeviceMover(Mover):
    """Copies between a device and shared memory, in two threads that wait for copies so that training does not.

    Down: a snapshot is cloned on the device first (a fraction of a millisecond for 43 M weights), so that training may
    change the weights while the slower copy to main memory runs. It is copied once the exchange has used the last one.
    Up: a delta is demanded whenever an exchange has ended, copied to the device at once, and summed there until the
    next update takes it. So the exchange does not wait for the next update, and the daemon's slot is free after a copy.

    An average that arrives less than a copy time before an update is too late for it. So the mover measures how long
    steps and copies take, and tells the exchange from which time on requests should wait for the weights after the
    update.

    A snapshot contains the deltas summed on the device although the weights do not yet. So the exchange may forget a
    delta as soon as it is on the device, however many arrive before the next update.

    Args:
        mailbox: Shared with the exchange.
        wake: Notifies the exchange of changes.
        weights: Weights on the device; only their shape and device are used.
        copies: Copies of that device.
    """

    def __init__(self, mailbox: Mailbox, wake: Callable[[], None], weights: torch.Tensor, copies: Copies) -> None:
        super().__init__(mailbox, wake)
        self._copies = copies
        self._slots = [torch.from_numpy(part) for part in mailbox.weights]
        self._deltas = [torch.from_numpy(part) for part in mailbox.deltas]
        self._clone, self._landed = torch.empty_like(weights), torch.empty_like(weights)
        self._sums = [DeltaSum(torch.empty_like(weights)) for _ in range(2)]
        self._gathering, self._taken = self._sums
        self._brought = 0  # number of the last delta in the sums or in the weights
        self._cloned: CopyEvent | None = None
        self._clone_step, self._clone_waits, self._copying = 0, False, False
        # held while work is issued or recorded, never while waiting for it
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._ended = False
        self._updated_at = self._demanded_at = self._step_s = self._lead_s = 0.0
        self._threads = [
            threading.Thread(target=run, name=f"exchange {name}", daemon=True)
            for name, run in (("down", self._run_down), ("up", self._run_up))
        ]
        for thread in self._threads:
            thread.start()

    def restart(self) -> None:
        """Drop deltas of the old weights, and a clone that was not copied yet."""
        with self._lock:
            super().restart()
            self._brought = self._mailbox.released = self._mailbox.offered
            self._gathering.steps.clear()
            self._clone_waits = False

    def give(self, weights: torch.Tensor, step: int) -> bool:
        """Clone the weights on the device; False if the previous clone is being copied or was not copied in time."""
        with self._lock:
            if self._copying:
                return False
            waiting = (self._clone_waits and self._wanted()) or self._mailbox.read != self._mailbox.written
            self._clone.copy_(weights.detach(), non_blocking=True)
            self._cloned, self._clone_step, self._clone_waits = self._copies.mark(), step, True
            self._mailbox.newest = step
        self._news.set()
        return not waiting

    def update_begins(self) -> None:
        """Measure the step time, and set the time from which on requests should wait for the next weights."""
        now = time.monotonic()
        self._step_s = _mean(self._step_s, now - self._updated_at) if self._updated_at else 0.0
        self._updated_at = now
        self._mailbox.lead_s = self._lead_s
        self._mailbox.deadline = now + self._step_s - _MARGIN * self._lead_s if self._step_s else 0.0

    def ready(self) -> bool:
        """Whether there is a delta on the device; never waits."""
        with self._lock:
            steps = self._gathering.steps or self._taken.steps
            self.oldest = min(steps, default=0)
            return bool(steps)

    def take(self) -> torch.Tensor:
        """The sum of the deltas; the training stream waits for the last addition before it reads the sum."""
        with self._lock:
            if not self._taken.steps:
                self._gathering, self._taken = self._taken, self._gathering
                assert self._taken.added is not None
                self._copies.follow(self._taken.added)
                if self._clone_waits:  # a later snapshot of the clone must contain the sum that is taken here
                    self._clone.add_(self._taken.values)
                    self._cloned = self._copies.mark()
            return self._taken.values

    def release(self) -> None:
        """Allow reuse of the memory once the training stream has read it."""
        with self._lock:
            self._taken.steps.clear()
            self._taken.readers += (self._copies.mark(),)

    def close(self) -> None:
        """Stop both threads, then close the copies."""
        self._ended = True
        self._news.set()
        self._mailbox.bell.ring()
        for thread in self._threads:
            thread.join()
        self._copies.close()
        self._deltas.clear()
        self._slots.clear()

    # --- down

    def _run_down(self) -> None:
        while not self._ended:
            self._news.wait(_IDLE_S)
            self._news.clear()
            self._publish()

    def _wanted(self) -> bool:
        """Whether the exchange has used the last snapshot, or has no weights since `restart`."""
        mailbox = self._mailbox
        return mailbox.used == mailbox.written or mailbox.snapshot_generation != self.generation

    def _publish(self) -> None:
        """Copy the newest weights to the mailbox, if the exchange wants them."""
        mailbox = self._mailbox
        with self._lock:
            number = mailbox.written
            if not (self._clone_waits and self._wanted() and mailbox.read == number):
                return
            self._copying, self._clone_waits = True, False
            note = (self._clone_step, self._brought, self.generation)
            cloned, gathered = self._cloned, self._gathering
            if gathered.steps:
                cloned = self._copies.add("down", self._clone, gathered.values, (cloned, gathered.added), first=False)
                gathered.readers += (cloned,)
            copied = self._copies.copy("down", self._slots[(number + 1) % 2], self._clone, (cloned,))
        copied.wait()
        mailbox.send_snapshot(*note)
        with self._lock:
            self._copying = False
            mailbox.released = max(mailbox.released, self._brought)
        self._wake()

    # --- up

    def _run_up(self) -> None:
        ended = 0
        while not self._ended:
            rung, now = self._mailbox.bell.listen(_IDLE_S), self._mailbox.ended
            if self._clone_waits:
                self._news.set()
            # a delta costs a copy of all weights, so demand one per exchange, unless an exchange takes very long
            if (now != ended or not rung) and self._mailbox.demand():
                ended, self._demanded_at = now, time.monotonic()
                self._wake()
            if self._mailbox.delta_waits() and self._mailbox.offered != self._brought and not self._outdated():
                self._bring()

    def _bring(self) -> None:
        """Copy a delta to the device, and add it to the sum there."""
        mailbox = self._mailbox
        number, step, generation = mailbox.offered, mailbox.delta_step, mailbox.delta_generation
        self._copies.copy("up", self._landed, self._deltas[number % 2]).wait()
        with self._lock:
            if generation == self.generation:
                self._gathering.add("up", self._landed, step, self._copies)
                self._brought = number
            # the exchange keeps only the last delta: while a snapshot that lacks this one is being copied, the exchange
            # must not make another
            if not self._copying:
                mailbox.released = max(mailbox.released, number)
        self._lead_s = _mean(self._lead_s, time.monotonic() - self._demanded_at)
        self._wake()


def _mean(mean: float, value: float) -> float:
    """Exponential moving average over about ten values; the first value initializes it."""
    return value if not mean else mean + (value - mean) / 10


class DeltaSum:
    """Sum of deltas on a device.

    Attributes:
        values: The sum; undefined if there are none.
        steps: For each delta, the training step of the oldest weights from which it was computed.
        added: Point at which the last addition ends.
        readers: Points at which readers of the sum end.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.steps: list[int] = []
        self.added: CopyEvent | None = None
        self.readers: Points = ()

    def add(
        self, direction: Direction, delta: torch.Tensor, step: int, copies: Copies, scale: float = 1.0
    ) -> CopyEvent:
        """Add `scale * delta`; returns the point at which that ends."""
        self.added = copies.add(direction, self.values, delta, self.readers, not self.steps, scale)
        self.readers = ()
        self.steps.append(step)
        return self.added
