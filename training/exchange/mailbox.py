"""Shared memory between a training process and its exchange: two channels of one slot each, a bell, and no locks.

The snapshot channel brings weights to the exchange, the delta channel brings back what is to be added to them. Each
channel counts what was written and what was read in two words; either word has one writer, and a slot belongs to the
writer while they are equal and to the reader while they differ. So a side that is killed or stopped at any moment
never blocks the other. Each channel has two buffers that swap roles, which saves copying: the exchange works in the
snapshot it was given last while the next one is being written, and gathers the next delta while the last one is read.

A delta is handed over on demand: the training process raises `wanted`, the exchange hands over everything that it has
averaged until then, and sets `handed` to the demand that it has met. It says in `gathered` whether there is anything,
and rings the bell when there is news. So nothing that comes before the demand has to wait for the next training step.

The memory is an anonymous file (memfd) that the daemon inherits: it has no name, so nothing can be left behind.
"""

import contextlib
import mmap
import os
import select
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_PAGE = 4096
# words that the training process writes, then words that the exchange writes
_COUNTS = ["written", "released", "ticks", "step", "snapshot_step", "snapshot_taken", "snapshot_generation"]
_COUNTS += ["wanted", "updating", "newest"]
_COUNTS += [
    "read",
    "offered",
    "handed",
    "gathered",
    "used",
    "delta_step",
    "delta_generation",
    "initiated",
    "finished",
    "answered",
    "failed",
    "late",
    "skipped",
]
_COUNTS += ["bytes_sent", "bytes_received", "last_peer"]
_FIGURES = ["deadline", "lead_s"]
_FIGURES += ["last_s", "total_s", "distance", "cpu_seconds", "beat"]


class Mailbox:
    """The mapped memory; counts and figures are attributes.

    Attributes:
        weights: Two buffers for snapshots; number k is in `weights[k % 2]`.
        deltas: Two buffers for deltas; number k is in `deltas[k % 2]`.
        fetched: Where weights of a neighbour go for a newcomer.
        wanted: Demands for a delta so far.
        handed: The last demand that was met, if only by the answer that there is nothing.
        gathered: Chunks averaged since the last delta was handed over.
        updating: Training step whose update is about to be made, or was made last.
        newest: Training step of the newest weights that the training process can give a snapshot of.
        used: Number of the last snapshot of which anything was sent.
        deadline: What is averaged from then on (monotonic seconds) is probably too late for the next update; 0 if all
            that is averaged before an update reaches it.
        lead_s: Seconds from an averaging until an update can have it.
    """

    written: int
    released: int
    ticks: int
    step: int
    snapshot_step: int
    snapshot_taken: int
    snapshot_generation: int
    wanted: int
    updating: int
    newest: int
    read: int
    offered: int
    handed: int
    gathered: int
    used: int
    delta_step: int
    delta_generation: int
    initiated: int
    finished: int
    answered: int
    failed: int
    late: int
    skipped: int
    bytes_sent: int
    bytes_received: int
    last_peer: int
    deadline: float
    lead_s: float
    last_s: float
    total_s: float
    distance: float
    cpu_seconds: float
    beat: float

    def __init__(self, file: int, size: int, bell: "Bell | None" = None) -> None:
        """Map a file.

        Args:
            file: Its descriptor, which remains the caller's.
            size: Weights in each buffer.
            bell: Rung by the exchange, listened to by the training process.
        """
        self._map = mmap.mmap(file, mailbox_bytes(size))
        self.bell = bell or Bell()
        self.size = size
        self._counts = np.frombuffer(self._map, np.int64, len(_COUNTS), 64)
        self._figures = np.frombuffer(self._map, np.float64, len(_FIGURES), 2048)
        parts = [np.frombuffer(self._map, np.float32, size, _PAGE + k * _stride(size)) for k in range(5)]
        self.weights = (parts[0], parts[1])
        self.deltas = (parts[2], parts[3])
        self.fetched = parts[4]

    def __getattr__(self, name: str) -> Any:
        if name in _COUNT_AT:
            return int(self._counts[_COUNT_AT[name]])
        if name in _FIGURE_AT:
            return float(self._figures[_FIGURE_AT[name]])
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _COUNT_AT:
            self._counts[_COUNT_AT[name]] = value
        elif name in _FIGURE_AT:
            self._figures[_FIGURE_AT[name]] = value
        else:
            super().__setattr__(name, value)

    def snapshot_slot(self) -> Floats | None:
        """Where the training process may write its next snapshot; None while the last one has not been read."""
        number = self.written
        return self.weights[(number + 1) % 2] if self.read == number else None

    def send_snapshot(self, step: int, taken: int, generation: int) -> None:
        """Hand over what was written to the slot.

        Args:
            step: Training step of the weights.
            taken: Number of the last delta that they contain.
            generation: Grows when weights begin anew.
        """
        self.snapshot_step, self.snapshot_taken, self.snapshot_generation = step, taken, generation
        fence()
        self.written += 1

    def demand(self) -> bool:
        """Ask for a delta, unless there is nothing to be had or a demand is unmet; whether a demand is new."""
        if not self.gathered or self.wanted != self.handed or self.offered != self.released:
            return False
        self.wanted += 1
        return True

    def met(self) -> bool:
        """Whether the last demand was met."""
        met = self.handed == self.wanted
        fence()
        return met

    def delta_waits(self) -> bool:
        """Whether the training process may read a delta."""
        waits = self.offered != self.released
        fence()
        return waits

    def send_delta(self, step: int, generation: int) -> None:
        """Hand over the delta in `deltas[(offered + 1) % 2]`.

        Args:
            step: Training step of the oldest snapshot that it was computed from.
            generation: The generation of that snapshot.
        """
        self.delta_step, self.delta_generation = step, generation
        fence()
        self.offered += 1

    @property
    def ended(self) -> int:
        """Exchanges that are over, on either side, well or not."""
        return self.finished + self.answered + self.failed

    def forget_fetched(self) -> None:
        """Give the memory of `fetched` back to the system until it is used again."""
        discard(self._map, _PAGE + 4 * _stride(self.size), _stride(self.size))

    def silent_s(self) -> float:
        """Seconds since the exchange's last sign of life."""
        return max(0.0, time.monotonic() - self.beat) if self.beat else 0.0

    def close(self) -> None:
        """Unmap, unless a buffer is still referenced elsewhere: then the memory goes with its last user."""
        del self._counts, self._figures, self.weights, self.deltas, self.fetched
        with contextlib.suppress(BufferError):
            self._map.close()


class Bell:
    """A pipe by which the exchange wakes the training process; either side may have one end only, or none.

    Args:
        hears: Descriptor of the end to listen at, or -1.
        rings: Descriptor of the end to ring at, or -1.
    """

    def __init__(self, hears: int = -1, rings: int = -1) -> None:
        self.hears, self.rings = hears, rings
        self._poll = select.poll()
        for end in (hears, rings):
            if end >= 0:
                os.set_blocking(end, False)
        if hears >= 0:
            self._poll.register(hears, select.POLLIN)

    @classmethod
    def make(cls) -> "Bell":
        """A bell with both ends, which child processes inherit only where they are passed on."""
        return cls(*os.pipe())

    def ring(self) -> None:
        """Never waits; several rings that were not heard yet count as one."""
        if self.rings >= 0:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self.rings, b"!")

    def listen(self, timeout_s: float) -> bool:
        """Wait until it rings or the time is over; whether it has rung since the last call."""
        if self.hears < 0 or not self._poll.poll(1000 * timeout_s):
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self.hears, 4096)
        return True

    def close(self) -> None:
        """Close both ends."""
        for end in (self.hears, self.rings):
            if end >= 0:
                os.close(end)
        self.hears = self.rings = -1


_COUNT_AT = {name: index for index, name in enumerate(_COUNTS)}
_FIGURE_AT = {name: index for index, name in enumerate(_FIGURES)}


def make_file(size: int) -> int:
    """Descriptor of a new nameless file for a mailbox; not inherited unless passed on."""
    return make_memory(mailbox_bytes(size))


def make_memory(length: int) -> int:
    """Descriptor of a new nameless file of so many bytes, which take memory once they are written."""
    if sys.platform == "linux":
        file = os.memfd_create("starling-exchange", os.MFD_CLOEXEC)
    else:
        file, name = tempfile.mkstemp()
        os.unlink(name)  # noqa: PTH108
    os.ftruncate(file, length)
    return file


def discard(memory: mmap.mmap, start: int, length: int) -> None:
    """Give a part of such a file back to the system; it reads as zeros then."""
    if hasattr(mmap, "MADV_REMOVE"):
        memory.madvise(mmap.MADV_REMOVE, start, length)


def mailbox_bytes(size: int) -> int:
    """Bytes of a mailbox for so many weights."""
    return _PAGE + 5 * _stride(size)


def fence() -> None:
    """Order the memory accesses before against those after, also on processors that reorder them.

    Releasing a lock publishes what was written before, and taking one after it orders what follows.
    """
    for _ in range(2):
        with _FENCE:
            pass


_FENCE = threading.Lock()


def whole_pages(length: int) -> int:
    """Bytes, rounded up to whole pages."""
    return -(-length // _PAGE) * _PAGE


def _stride(size: int) -> int:
    return whole_pages(4 * size)
