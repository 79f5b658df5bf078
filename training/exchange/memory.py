"""Exchange between threads of one process, for tests and simulation: the same averaging, without a network."""

import itertools
import math
import threading
import time

import numpy as np
import torch

from training.config import ExchangeConfig
from training.exchange.averaging import Averager
from training.exchange.base import ExchangeSetup
from training.exchange.client import MailboxExchange
from training.exchange.neighbours import by_distance, neighbour
from training.exchange.reporting import Report
from training.exchange.wire import chunk_weights
from training.membership import View

_IDLE_S = 0.1

_numbers = itertools.count()
_open: dict[str, "MemoryExchange"] = {}


class MemoryExchange(MailboxExchange):
    """An exchange whose other side is a thread; it reaches peers by calling them.

    A thread holds its own lock or a peer's, never both, so that no ring can deadlock.
    """

    def __init__(self, cfg: ExchangeConfig, setup: ExchangeSetup) -> None:
        """Start the thread."""
        super().__init__(setup.size)
        self._cfg, self._setup = cfg, setup
        self._averager = Averager(self._mailbox, chunk_weights(setup.size, cfg.chunk_kb), cfg.wire)
        self._report = Report(self._mailbox)
        self._view = View()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._ended = False
        self._underway: tuple[int, int] | None = None
        self._ticks = self._budget = self._number = 0
        self.endpoint = f"memory://{next(_numbers)}"
        _open[self.endpoint] = self
        self._thread = threading.Thread(target=self._run, name=self.endpoint, daemon=True)
        self._thread.start()

    def set_view(self, view: View) -> None:
        """See `Exchange.set_view`."""
        self._view = view

    def fetch(self, timeout_s: float) -> torch.Tensor | None:
        """See `Exchange.fetch`."""
        for node in by_distance(self._view, self._setup.node):
            peer = self._peer(node)
            if peer is None or peer._setup.size != self._size:
                continue
            with peer._lock:
                averager = peer._averager
                parts = [averager.weights(index).copy() for index in range(averager.chunks)] if averager.loaded else []
            if parts and np.isfinite(weights := np.concatenate(parts)).all():
                return torch.from_numpy(weights)
        return None

    def alive(self) -> bool:
        """See `Exchange.alive`."""
        return self._thread.is_alive() and not self._ended

    def close(self) -> None:
        """See `Exchange.close`."""
        self._ended = True
        _open.pop(self.endpoint, None)
        self._news.set()
        self._thread.join(5.0)
        self._close_mailbox()

    def _wake(self) -> None:
        self._news.set()

    def _peer(self, node: int) -> "MemoryExchange | None":
        member = self._view.find(node)
        if member is None or len(member.endpoints) <= self._setup.rank:
            return None
        return _open.get(member.endpoints[self._setup.rank])

    def _run(self) -> None:
        while not self._ended:
            self._news.wait(_IDLE_S)
            self._news.clear()
            self._poll(time.monotonic())
            if self._mailbox.ticks != self._ticks:
                self._ticks, self._budget = self._mailbox.ticks, self._cfg.per_step
            while self._budget and self._averager.loaded and not self._ended:
                self._budget -= 1
                self._exchange()
                self._poll(time.monotonic())

    def _poll(self, now: float) -> None:
        with self._lock:
            self._averager.poll()
            self._report.write(now, self._averager)

    def _exchange(self) -> None:
        """One exchange with the next neighbour."""
        number, self._number = self._number, self._number + 1
        node = neighbour(self._cfg.neighbours, self._view, self._setup.node, number, self._setup.seed)
        if node is None:
            return
        self._report.initiated += 1
        peer, began, squares, compared = self._peer(node), time.monotonic(), 0.0, 0
        averager, generation = self._averager, self._averager.generation
        for index in range(averager.chunks):
            sent = bytearray(averager.count(index) * averager.wire.itemsize)
            with self._lock:
                averager.ask(index, sent)
                step = averager.step
                self._underway = (node, index)
            answer = None if peer is None else peer._answer(self, index, sent)
            if answer is None:
                self._underway = None
                self._report.failed += 1
                return
            with self._lock:
                self._underway = None
                if not answer:
                    continue  # crossed
                averager.poll()
                if averager.generation != generation:
                    self._report.failed += 1
                    return
                difference = averager.settle(index, sent, answer, step)
            self._report.bytes_sent += len(sent)
            self._report.received(len(answer), late=False)
            if not math.isnan(difference):
                squares += difference
                compared += averager.count(index)
        self._report.finish(time.monotonic() - began, squares, compared, node)

    def _answer(self, other: "MemoryExchange", index: int, message: bytearray) -> bytearray | None:
        """The passive side; runs in the asker's thread. Empty if requests crossed: the lower node's is answered."""
        with self._lock:
            averager, asker = self._averager, other._averager
            averager.poll()
            if self._underway == (other._setup.node, index) and self._setup.node < other._setup.node:
                self._report.answered(0, index == averager.chunks - 1)
                return bytearray()
            same = (asker.size, asker.chunk, asker.wire.kind) == (averager.size, averager.chunk, averager.wire.kind)
            if self._ended or not averager.loaded or not same:
                return None
            answer = bytearray(message)
            averager.answer(index, message, answer)
            self._report.answered(len(answer), index == averager.chunks - 1)
        self._news.set()
        return answer
