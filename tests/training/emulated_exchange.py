"""Learners whose exchange is emulated by a test: live weights, both sides of the mailbox, and exact sums."""

import numpy as np
import torch
from emulated_device import EmulatedCopies
from support import wait_until

from training.exchange.averaging import Averager
from training.exchange.client import MailboxExchange
from training.exchange.movers import DeviceMover

SIZE, CHUNK = 10, 4


class Bare(MailboxExchange):
    """A mailbox whose exchange side the test emulates."""

    endpoint = ""

    def _wake(self):
        pass

    def set_view(self, view):
        raise NotImplementedError

    def fetch(self, timeout_s):
        raise NotImplementedError

    def alive(self):
        return True

    def close(self):
        self._close_mailbox()


class BareDevice(Bare):
    """The same for weights on a device, whose copies take half a millisecond."""

    def _make_mover(self, weights):
        return DeviceMover(self._mailbox, self._wake, weights, EmulatedCopies(0.0005))


class Learner:
    """Live weights, the two sides of its mailbox, and what its gradients have added."""

    def __init__(self, number, wire="fp32", outside=Bare):
        rng = np.random.default_rng(number)
        self.live = torch.from_numpy(rng.integers(-512, 512, SIZE).astype(np.float32))
        self.exact = self.live.double().clone()  # initial weights and gradient steps
        self.outside = outside(SIZE)
        self.inside = Averager(self.outside._mailbox, CHUNK, wire)
        self.outside.start(self.live, 0)
        wait_until(self.inside.poll, every_s=0.001)
        self.rng = rng
        self.step = 0
        self.trained = {0: self.exact.clone()}  # by step
        self.averaged = torch.zeros(SIZE, dtype=torch.float64)  # what averagings have added to the working copy

    def gradient(self):
        step = torch.from_numpy(self.rng.integers(-64, 64, SIZE).astype(np.float32))
        self.live += step
        self.exact += step.double()
        self.step += 1
        self.trained[self.step] = self.exact.clone()

    def take(self):
        if self.outside.ready():
            self.live += self.outside.take()
            self.outside.release()

    def give(self):
        return self.outside.give(self.live, self.step)

    def poll(self):
        """A turn of the exchange, with the requests of the training process."""
        self.outside._mailbox.demand()
        self.inside.poll()

    def average(self, function, *values):
        """What the exchange does to its working copy."""
        before = self.working().double()
        function(*values)
        self.averaged += self.working().double() - before
        self.outside._mailbox.answered += 1
        self.outside._mailbox.bell.ring()

    def check(self):
        """The working copy is the snapshot with all averages, those that the snapshot contains or lacks alike."""
        expected = self.trained[self.inside.step] + self.averaged
        assert torch.allclose(self.working().double(), expected, rtol=0, atol=1e-2)

    def drain(self):
        for _ in range(3):
            self.poll()
            self.take()

    def working(self):
        """The exchange's copy of the weights."""
        return torch.from_numpy(np.concatenate([self.inside.weights(index) for index in range(self.inside.chunks)]))

    def close(self):
        self.outside.close()


class Network:
    """Messages in flight; the test decides when each is delivered, if ever."""

    def __init__(self, learners):
        self.learners = learners
        self.requests, self.replies = [], []

    def ask(self, i, j, chunk):
        inside = self.learners[i].inside
        message = bytearray(inside.count(chunk) * inside.wire.itemsize)
        inside.ask(chunk, message)
        self.requests.append((i, j, chunk, message, inside.step))

    def answer(self, which):
        i, j, chunk, message, step = self.requests.pop(which % len(self.requests))
        reply = bytearray(message)
        self.learners[j].average(self.learners[j].inside.answer, chunk, message, reply)
        self.replies.append((i, chunk, message, reply, step))

    def settle(self, which):
        i, chunk, message, reply, step = self.replies.pop(which % len(self.replies))
        self.learners[i].average(self.learners[i].inside.settle, chunk, message, reply, step)

    def exchange(self, i, j, chunk):
        """Ask, answer and settle at once."""
        self.ask(i, j, chunk)
        self.answer(len(self.requests) - 1)
        self.settle(len(self.replies) - 1)

    def quiesce(self):
        while self.requests:
            self.answer(0)
        while self.replies:
            self.settle(0)
        for learner in self.learners:
            learner.drain()
