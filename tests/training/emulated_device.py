"""An emulated device in main memory, whose copies take a given time, to test `DeviceMover` without a GPU.

Work is done when a caller waits for it, as late as possible, so that a read that comes too early gets the old values.
"""

import threading
import time

import torch

from training.exchange.device_copies import Copies, CopyEvent
from training.exchange.device_mover import DeviceMover
from training.exchange.zmq_exchange import ZmqExchange


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


class EmulatedCopies(Copies):
    """Copies of `copy_s` seconds in either direction; additions take no time, and are late all the same."""

    def __init__(self, copy_s=0.0):
        self.copy_s = copy_s
        self.copied = {"down": 0, "up": 0}
        self._last = {"down": None, "up": None}

    def mark(self):
        return EmulatedPoint(lambda: None, 0.0, None, ())

    def follow(self, point):
        point.wait()

    def copy(self, direction, target, source, after=()):
        self.copied[direction] += 1
        return self._begin(direction, lambda: target.copy_(source), self.copy_s, after)

    def add(self, direction, target, source, after, first):
        return self._begin(direction, lambda: target.copy_(source) if first else target.add_(source), 0.0, after)

    def _begin(self, direction, work, copy_s, after):
        point = self._last[direction] = EmulatedPoint(work, copy_s, self._last[direction], after)
        return point


class DeviceExchange(ZmqExchange):
    """The ZeroMQ exchange of a learner whose weights are on an emulated device."""

    copy_s = 0.005

    def _make_mover(self, weights):
        self.copies = EmulatedCopies(self.copy_s)
        return DeviceMover(self._mailbox, self._wake, weights, self.copies)
