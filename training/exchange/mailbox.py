"""Shared memory between a training process and its exchange: two channels of one slot each, and no locks.

The snapshot channel brings weights to the exchange, the delta channel brings back what is to be added to them. Each
channel counts what was written and what was read in two words; either word has one writer, and a slot belongs to the
writer while they are equal and to the reader while they differ. So a side that is killed or stopped at any moment
never blocks the other. Each channel has two buffers that swap roles, which saves copying: the exchange works in the
snapshot it was given last while the next one is being written, and gathers the next delta while the last one is read.

The memory is an anonymous file (memfd) that the daemon inherits: it has no name, so nothing can be left behind.
"""

import contextlib
import mmap
import os
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
_COUNTS += [
    "read",
    "offered",
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
_FIGURES = ["last_s", "total_s", "distance", "cpu_seconds", "beat"]


class Mailbox:
    """The mapped memory; counts and figures are attributes.

    Attributes:
        weights: Two buffers for snapshots; number k is in `weights[k % 2]`.
        deltas: Two buffers for deltas; number k is in `deltas[k % 2]`.
        fetched: Where weights of a neighbour go for a newcomer.
    """

    written: int
    released: int
    ticks: int
    step: int
    snapshot_step: int
    snapshot_taken: int
    snapshot_generation: int
    read: int
    offered: int
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
    last_s: float
    total_s: float
    distance: float
    cpu_seconds: float
    beat: float

    def __init__(self, file: int, size: int) -> None:
        """Map a file.

        Args:
            file: Its descriptor, which remains the caller's.
            size: Weights in each buffer.
        """
        self._map = mmap.mmap(file, mailbox_bytes(size))
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

    def forget_fetched(self) -> None:
        """Give the memory of `fetched` back to the system until it is used again."""
        if hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, _PAGE + 4 * _stride(self.size), _stride(self.size))

    def silent_s(self) -> float:
        """Seconds since the exchange's last sign of life."""
        return max(0.0, time.monotonic() - self.beat) if self.beat else 0.0

    def close(self) -> None:
        """Unmap, unless a buffer is still referenced elsewhere: then the memory goes with its last user."""
        del self._counts, self._figures, self.weights, self.deltas, self.fetched
        with contextlib.suppress(BufferError):
            self._map.close()


_COUNT_AT = {name: index for index, name in enumerate(_COUNTS)}
_FIGURE_AT = {name: index for index, name in enumerate(_FIGURES)}


def make_file(size: int) -> int:
    """Descriptor of a new nameless file for a mailbox; not inherited unless passed on."""
    if sys.platform == "linux":
        file = os.memfd_create("starling-exchange", os.MFD_CLOEXEC)
    else:
        file, name = tempfile.mkstemp()
        os.unlink(name)  # noqa: PTH108
    os.ftruncate(file, mailbox_bytes(size))
    return file


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


def _stride(size: int) -> int:
    return -(-4 * size // _PAGE) * _PAGE
