"""Lock-free shared memory between a training process and its exchange: two channels of one slot each, and a bell.

The snapshot channel carries weights to the exchange; the delta channel carries back what must be added to them. Each
channel has two counters, of what was written and what was read. Each counter has one writer, and the slot belongs to
the writer while they are equal and to the reader while they differ. So a side that is killed or suspended at any moment
never blocks the other. Each channel has two buffers that swap roles, which saves copying: the exchange works in its
last snapshot while the next one is being written, and collects the next delta while the last one is read.

A delta is handed over on demand: the training process increments `wanted`, the exchange hands over everything averaged
until then, and sets `handed` to the demand that it has met. `gathered` says whether there is anything to hand over, and
the bell signals changes. So nothing that is averaged before the demand has to wait for the next training step.

The memory is an anonymous file (memfd) that the daemon inherits: it has no name, so no file can be left behind.
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
# counters that the training process writes, then counters that the exchange writes
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
_COUNTS += ["bytes_sent", "bytes_received", "last_peer", "rested"]
_FIGURES = ["deadline", "lead_s"]
_FIGURES += ["last_s", "total_s", "distance", "cpu_seconds", "beat"]


class Mailbox:
    """The mapped memory; counters and figures are attributes.

    Attributes:
        weights: Two buffers for snapshots; number k is in `weights[k % 2]`.
        deltas: Two buffers for deltas; number k is in `deltas[k % 2]`.
        fetched: Buffer for the weights that a newcomer fetches from a neighbour.
        wanted: Number of demands for a delta so far.
        handed: The last demand that was met, possibly without a delta because nothing was averaged.
        gathered: Chunks averaged since the last delta was handed over.
        updating: Training step of the next update, or of the last one.
        newest: Training step of the newest weights of which the training process can make a snapshot.
        used: Number of the last snapshot of which anything was sent.
        rested: Number of the last tick whose first exchange has ended, or for which there is no neighbour.
        deadline: Monotonic time in seconds after which an average is probably too late for the next update; 0 if every
            average before an update reaches it.
        lead_s: Seconds that an average needs to reach an update.
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
    rested: int
    deadline: float
    lead_s: float
    last_s: float
    total_s: float
    distance: float
    cpu_seconds: float
    beat: float

    def __init__(self, file: int, size: int, bell: "Bell | None" = None) -> None:
        """Map the memory.

        Args:
            file: Descriptor of the file; still owned by the caller.
            size: Number of weights in each buffer.
            bell: Rung by the exchange, heard by the training process.
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
        """Buffer for the training process's next snapshot; None while the last one is unread."""
        number = self.written
        return self.weights[(number + 1) % 2] if self.read == number else None

    def send_snapshot(self, step: int, taken: int, generation: int) -> None:
        """Hand over the snapshot in the slot.

        Args:
            step: Training step of the weights.
            taken: Number of the last delta that they contain.
            generation: Increases whenever the weights are replaced.
        """
        self.snapshot_step, self.snapshot_taken, self.snapshot_generation = step, taken, generation
        fence()
        self.written += 1

    def demand(self) -> bool:
        """Demand a delta, unless there is none or the last demand is unmet; returns whether a demand was made."""
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
            step: Training step of the oldest snapshot from which it was computed.
            generation: Generation of that snapshot.
        """
        self.delta_step, self.delta_generation = step, generation
        fence()
        self.offered += 1

    @property
    def ended(self) -> int:
        """Number of exchanges that have ended, started on either side, successful or not."""
        return self.finished + self.answered + self.failed

    def forget_fetched(self) -> None:
        """Return the memory of `fetched` to the system until it is used again."""
        discard(self._map, _PAGE + 4 * _stride(self.size), _stride(self.size))

    def silent_s(self) -> float:
        """Seconds since the exchange's last sign of life."""
        return max(0.0, time.monotonic() - self.beat) if self.beat else 0.0

    def close(self) -> None:
        """Unmap the memory; if a buffer is still referenced, it is unmapped with the last reference."""
        del self._counts, self._figures, self.weights, self.deltas, self.fetched
        with contextlib.suppress(BufferError):
            self._map.close()


class Bell:
    """A pipe by which the exchange wakes the training process; a process may have one end, both or none.

    Args:
        hears: Descriptor of the read end, or -1.
        rings: Descriptor of the write end, or -1.
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
        """Make a bell with both ends; child processes inherit them only if they are passed on."""
        return cls(*os.pipe())

    def ring(self) -> None:
        """Ring without waiting; several unheard rings count as one."""
        if self.rings >= 0:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self.rings, b"!")

    def listen(self, timeout_s: float) -> bool:
        """Wait for a ring or the time-out; returns whether the bell has rung since the last call."""
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
    """Create an anonymous file for a mailbox and return its descriptor; not inherited unless passed on."""
    return make_memory(mailbox_bytes(size))


def make_memory(length: int) -> int:
    """Create an anonymous file of `length` bytes and return its descriptor; pages take memory once written."""
    if sys.platform == "linux":
        file = os.memfd_create("starling-exchange", os.MFD_CLOEXEC)
    else:
        file, name = tempfile.mkstemp()
        os.unlink(name)  # noqa: PTH108
    os.ftruncate(file, length)
    return file


def discard(memory: mmap.mmap, start: int, length: int) -> None:
    """Return a part of an anonymous file to the system; it then reads as zeros."""
    if hasattr(mmap, "MADV_REMOVE"):
        memory.madvise(mmap.MADV_REMOVE, start, length)


def mailbox_bytes(size: int) -> int:
    """Size in bytes of a mailbox for `size` weights."""
    return _PAGE + 5 * _stride(size)


def fence() -> None:
    """Memory barrier: order all memory accesses before it against those after it.

    Releasing a lock publishes earlier writes; taking it again orders later accesses.
    """
    for _ in range(2):
        with _FENCE:
            pass


_FENCE = threading.Lock()


def whole_pages(length: int) -> int:
    """Number of bytes, rounded up to whole pages."""
    return -(-length // _PAGE) * _PAGE


def _stride(size: int) -> int:
    return whole_pages(4 * size)
