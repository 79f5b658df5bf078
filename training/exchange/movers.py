"""How tensors get into shared memory and out of it: at once on a CPU, beside the computation on a GPU."""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch

from training.exchange.mailbox import Floats, Mailbox

HAND_OVER_S = 0.004
"""How long an update may wait for the daemon on the same machine to hand over what it has averaged; usually a tenth of
a millisecond will do. Without an answer the update goes on, and does not wait again before the daemon has answered."""


Direction = Literal["down", "up"]


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
        """See `Mover.restart`."""
        super().restart()
        self._taken = self._mailbox.offered

    def give(self, weights: torch.Tensor, step: int) -> bool:
        """See `Mover.give`."""
        slot = self._mailbox.snapshot_slot()
        if slot is None:
            return False
        torch.from_numpy(slot).copy_(weights.detach())
        self._mailbox.newest = step
        self._mailbox.send_snapshot(step, self._taken, self.generation)
        self._wake()
        return True

    def ready(self) -> bool:
        """See `Mover.ready`; waits for the daemon for a few milliseconds at most, for the network never."""
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
        """See `Mover.take`."""
        self._taken = self._mailbox.offered
        return self._deltas[self._taken % 2]

    def release(self) -> None:
        """See `Mover.release`."""
        mailbox = self._mailbox
        if self._taken == mailbox.offered and mailbox.delta_waits():
            mailbox.released = self._taken
            self._wake()

    def close(self) -> None:
        """See `Mover.close`."""
        self._deltas.clear()


class Point(ABC):
    """A point in a device's work."""

    @abstractmethod
    def wait(self) -> None:
        """Until the device has got there."""


Points = tuple["Point | None", ...]


class Copies(ABC):
    """What a `DeviceMover` needs of a device: the training stream, and one more for each direction.

    Work of a direction is done in order, beside training and the other direction; it begins after the given points.
    Nothing here waits on the CPU.
    """

    @abstractmethod
    def mark(self) -> Point:
        """Where the training stream's work ends so far."""

    @abstractmethod
    def follow(self, point: Point) -> None:
        """Have the training stream's further work wait for a point."""

    @abstractmethod
    def copy(self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Points = ()) -> Point:
        """Copy between device and main memory; where that ends."""

    @abstractmethod
    def add(
        self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Points, first: bool
    ) -> Point:
        """Add on the device, or replace what is there if it is the first; where that ends."""

    def close(self) -> None:  # noqa: B027 - not every device has something to end
        """Wait for everything that has begun."""


class DeviceMover(Mover):
    """Copies between a device and shared memory, in two threads that wait for copies so that training need not.

    Down: a snapshot is cloned on the device first (a fraction of a millisecond for 43 M weights), so that training may
    change the weights while the slower copy to main memory runs. It is copied once the exchange has used the last one.
    Up: a delta is demanded whenever an exchange has ended, copied to the device at once, and gathered there until the
    next update takes it. So nothing waits for an update to be noticed, and the daemon's slot is free after a copy.

    What is averaged within a copy's time before an update would be too late for it. So the mover learns how long steps
    and copies take, and tells the exchange from when on requests had better wait for the weights after the update.

    A snapshot contains what is gathered on the device, although the weights do not yet: so the exchange may forget a
    delta as soon as it is on the device, however many come before the next update.

    Args:
        mailbox: Shared with the exchange.
        wake: Tells the exchange that there is news.
        weights: On the device; says how many.
        copies: The device's.
    """

    def __init__(self, mailbox: Mailbox, wake: Callable[[], None], weights: torch.Tensor, copies: Copies) -> None:
        super().__init__(mailbox, wake)
        self._copies = copies
        self._slots = [torch.from_numpy(part) for part in mailbox.weights]
        self._deltas = [torch.from_numpy(part) for part in mailbox.deltas]
        self._clone, self._landed = torch.empty_like(weights), torch.empty_like(weights)
        self._sums = [_Sum(torch.empty_like(weights)) for _ in range(2)]
        self._gathering, self._taken = self._sums
        self._brought = 0  # number of the last delta in the sums or in the weights
        self._cloned: Point | None = None
        self._clone_step, self._clone_waits, self._copying = 0, False, False
        # held while work is issued or noted, never while it is waited for
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
        """See `Mover.restart`."""
        with self._lock:
            super().restart()
            self._brought = self._mailbox.released = self._mailbox.offered
            self._gathering.steps.clear()
            self._clone_waits = False

    def give(self, weights: torch.Tensor, step: int) -> bool:
        """See `Mover.give`."""
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
        """See `Mover.update_begins`."""
        now = time.monotonic()
        self._step_s = _mean(self._step_s, now - self._updated_at) if self._updated_at else 0.0
        self._updated_at = now
        self._mailbox.lead_s = self._lead_s
        self._mailbox.deadline = now + self._step_s - _MARGIN * self._lead_s if self._step_s else 0.0

    def ready(self) -> bool:
        """See `Mover.ready`: what is on the device already."""
        with self._lock:
            steps = self._gathering.steps or self._taken.steps
            self.oldest = min(steps, default=0)
            return bool(steps)

    def take(self) -> torch.Tensor:
        """See `Mover.take`."""
        with self._lock:
            if not self._taken.steps:
                self._gathering, self._taken = self._taken, self._gathering
                assert self._taken.added is not None
                self._copies.follow(self._taken.added)
                if self._clone_waits:  # a snapshot that is made of it later must not lack what leaves the gathering
                    self._clone.add_(self._taken.values)
                    self._cloned = self._copies.mark()
            return self._taken.values

    def release(self) -> None:
        """See `Mover.release`."""
        with self._lock:
            self._taken.steps.clear()
            self._taken.readers += (self._copies.mark(),)

    def close(self) -> None:
        """See `Mover.close`."""
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
        """Whether the exchange has sent anything of the last snapshot, or lacks the weights from after `restart`."""
        mailbox = self._mailbox
        return mailbox.used == mailbox.written or mailbox.snapshot_generation != self.generation

    def _publish(self) -> None:
        """Copy the newest weights to the mailbox, if the exchange has use for them."""
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
            # a delta costs a copy of all weights: one for a whole exchange, unless it takes very long
            if (now != ended or not rung) and self._mailbox.demand():
                ended, self._demanded_at = now, time.monotonic()
                self._wake()
            if self._mailbox.delta_waits() and self._mailbox.offered != self._brought and not self._outdated():
                self._bring()

    def _bring(self) -> None:
        """Copy a delta to the device, and add it to what is gathered there."""
        mailbox = self._mailbox
        number, step, generation = mailbox.offered, mailbox.delta_step, mailbox.delta_generation
        self._copies.copy("up", self._landed, self._deltas[number % 2]).wait()
        with self._lock:
            if generation == self.generation:
                self._gathering.add(self._landed, step, self._copies)
                self._brought = number
            # the exchange keeps the last delta only: it must not make another before it has a snapshot on its way that
            # lacks this one
            if not self._copying:
                mailbox.released = max(mailbox.released, number)
        self._lead_s = _mean(self._lead_s, time.monotonic() - self._demanded_at)
        self._wake()


_IDLE_S = 0.05
_MARGIN = 1.5  # of the time that copies take on the average


def _mean(mean: float, value: float) -> float:
    """A running mean over some ten values; the first one counts as it is."""
    return value if not mean else mean + (value - mean) / 10


class _Sum:
    """Deltas gathered on a device.

    Attributes:
        values: Their sum, if there are any.
        steps: Training steps of the oldest weights that each was computed from.
        added: Where the last addition ends.
        readers: Where readers end.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.steps: list[int] = []
        self.added: Point | None = None
        self.readers: Points = ()

    def add(self, delta: torch.Tensor, step: int, copies: Copies) -> None:
        """Add one."""
        self.added = copies.add("up", self.values, delta, self.readers, first=not self.steps)
        self.readers = ()
        self.steps.append(step)


class _CudaPoint(Point):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()  # type: ignore[no-untyped-call]


class CudaCopies(Copies):
    """Copies between a GPU and page-locked shared memory; see `Copies`."""

    def __init__(self, device: torch.device, mailbox: Mailbox) -> None:
        self._device = device
        self._streams = {name: torch.cuda.Stream(device) for name in ("down", "up")}  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            self._locked = [part for part in (*mailbox.weights, *mailbox.deltas) if _lock_pages(part)]

    def mark(self) -> Point:
        """See `Copies.mark`."""
        return _CudaPoint(torch.cuda.current_stream(self._device))

    def follow(self, point: Point) -> None:
        """See `Copies.follow`."""
        assert isinstance(point, _CudaPoint)
        torch.cuda.current_stream(self._device).wait_event(point.event)

    def copy(self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Points = ()) -> Point:
        """See `Copies.copy`."""
        return self._on(direction, after, lambda: target.copy_(source, non_blocking=True))

    def add(
        self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Points, first: bool
    ) -> Point:
        """See `Copies.add`."""
        return self._on(direction, after, lambda: target.copy_(source) if first else target.add_(source))

    def close(self) -> None:
        """See `Copies.close`; unlocks the memory."""
        torch.cuda.synchronize(self._device)
        for part in self._locked:
            with contextlib.suppress(RuntimeError):
                torch.cuda.cudart().cudaHostUnregister(part.ctypes.data)  # type: ignore[no-untyped-call]

    def _on(self, direction: Direction, after: Points, work: Callable[[], object]) -> Point:
        stream = self._streams[direction]
        for point in after:
            if isinstance(point, _CudaPoint):
                stream.wait_event(point.event)
        with torch.no_grad(), torch.cuda.stream(stream):
            work()
        return _CudaPoint(stream)


def _lock_pages(part: Floats) -> bool:
    """Page-lock memory, so that copies to and from it run beside everything else; without it they still work."""
    try:
        return int(torch.cuda.cudart().cudaHostRegister(part.ctypes.data, part.nbytes, 0)) == 0  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
