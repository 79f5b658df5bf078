"""An emulated device in main memory, whose copies take a given time, to test exchanges of a GPU without one.

Work is done when a caller waits for it, as late as possible, so that a read that comes too early gets the old values.
"""

import mmap
import os
import threading
import time

import numpy as np
import torch

from training.exchange.client import ProcessExchange
from training.exchange.cuda_exchange import CudaExchange
from training.exchange.device import Copies, CopyEvent, PeerMemory, PeerMemoryError
from training.exchange.mailbox import make_memory
from training.exchange.movers import DeviceMover


class EmulatedPoint(CopyEvent):
    """Work of one direction; what came before it is done first."""

    def __init__(self, work, copy_s, before, after):
        self._work, self._due = work, time.monotonic() + copy_s
        self._before = [point for point in (before, *after) if point is not None]
        self._lock = threading.Lock()

    def wait(self):
        with self._lock:
            if self._work is None:
                return
            for point in self._before:
                point.wait()
            time.sleep(max(0.0, self._due - time.monotonic()))
            with torch.no_grad():
                self._work()
            self._work, self._before = None, []

    def done(self):
        return self._work is None or (time.monotonic() >= self._due and all(point.done() for point in self._before))


class EmulatedCopies(Copies):
    """Copies of `copy_s` seconds in either direction; additions take no time, and are late all the same."""

    def __init__(self, copy_s=0.0):
        self.copy_s = copy_s
        self.copied = {"down": 0, "up": 0, "across": 0}
        self._last = dict.fromkeys(self.copied)

    def mark(self):
        return EmulatedPoint(lambda: None, 0.0, None, ())

    def follow(self, point):
        point.wait()

    def copy(self, direction, target, source, after=()):
        self.copied[direction] += 1
        return self._begin(direction, lambda: target.copy_(source), self.copy_s, after)

    def run(self, direction, work, after=()):
        return self._begin(direction, work, 0.0, after)

    def _begin(self, direction, work, copy_s, after):
        point = self._last[direction] = EmulatedPoint(work, copy_s, self._last[direction], after)
        return point


class DeviceExchange(ProcessExchange):
    """The ZeroMQ exchange of a learner whose weights are on an emulated device."""

    copy_s = 0.005

    def _make_mover(self, weights):
        self.copies = EmulatedCopies(self.copy_s)
        return DeviceMover(self._mailbox, self._wake, weights, self.copies)


class SharedFiles(PeerMemory):
    """Files in main memory in place of the GPU's memory; other processes open their owner's descriptors."""

    def __init__(self):
        self._files = []

    def allocate(self, length):
        file = make_memory(4 * length)
        self._files.append(file)
        return self._map(file, length), {"process": os.getpid(), "file": file, "bytes": 4 * length}

    def open(self, handle, length):
        if handle.get("bytes") != 4 * length:
            raise PeerMemoryError("other weights")
        try:
            file = os.open(f"/proc/{handle['process']}/fd/{handle['file']}", os.O_RDWR)
        except OSError as error:
            raise PeerMemoryError(str(error)) from error
        try:
            return self._map(file, length)
        finally:
            os.close(file)

    def close(self):
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _map(self, file, length):
        return torch.from_numpy(np.frombuffer(mmap.mmap(file, 4 * length), np.float32))


class EmulatedCudaExchange(CudaExchange):
    """The exchange of learners on one GPU, on the emulated device."""

    def _device(self, weights):
        self.copies = EmulatedCopies()
        return SharedFiles(), self.copies
