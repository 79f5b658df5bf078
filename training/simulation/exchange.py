"""The exchange of weights in virtual time: the averaging of the real ones, with messages that the clock delivers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from training.exchange.averaging import Averager
from training.exchange.base import ExchangeStats
from training.exchange.client import MailboxExchange
from training.exchange.mailbox import Mailbox
from training.exchange.neighbours import Kind, by_distance, hop, resolve, ring_order
from training.exchange.wire import chunk_weights
from training.membership import View
from training.simulation.clock import Clock
from training.simulation.network import Network

_CHUNK_KB = 1024
"""Of a chunk at most, as `ExchangeConfig.chunk_kb` has it."""
_RINGS = 64
"""Random rings remembered at a time: learners are at most so many exchanges apart, or a ring is shuffled again."""


@dataclass
class Ether:
    """What the exchanges of a simulation share.

    Attributes:
        clock: Virtual time.
        network: Carries messages.
        ranks: Learner that speaks for each node.
        neighbours: Whom a node asks.
        seed: Of the random ring.
        per_step: Exchanges that a node begins a step at most.
        num_bytes: Of the weights on the wire.
        timeout_s: Until a silent neighbour is given up.
        news: Is told the node to which something has happened.
    """

    clock: Clock
    network: Network
    ranks: dict[int, int]
    neighbours: Kind
    seed: int
    per_step: int
    num_bytes: float
    timeout_s: float
    news: Callable[[int], None]

    def __post_init__(self) -> None:
        self.open: dict[int, VirtualExchange] = {}
        self._nexts: dict[tuple[int, int], tuple[tuple[int, ...], dict[int, int]]] = {}

    @property
    def chunk_s(self) -> float:
        """Seconds from the sending of a chunk to the settling with its answer."""
        cluster = self.network.cluster
        chunk = 4 * chunk_weights(int(self.num_bytes / 4), _CHUNK_KB)
        return 2 * (cluster.link_ms / 1e3 + chunk / (cluster.link_gbit * 1e9 / 8))

    def carry(self, node: int, peer: int) -> float:
        """Send the weights in both directions; when the last chunk has come back."""
        here, there = self.ranks[node], self.ranks[peer]
        last = max(self.network.send(here, there, self.num_bytes), self.network.send(there, here, self.num_bytes))
        return last + self.chunk_s / 2

    def neighbour(self, view: View, node: int, number: int) -> int | None:
        """What `training.exchange.neighbours.neighbour` says, for a thousand nodes without a thousand shuffles."""
        count = len(view.nodes)
        shuffled = resolve(self.neighbours, count) == "random-ring"
        key = (view.number, number if shuffled else 0)
        if key not in self._nexts:
            if len(self._nexts) >= _RINGS:
                del self._nexts[next(iter(self._nexts))]
            order = ring_order(self.neighbours, view, number, self.seed)
            self._nexts[key] = order, {one: place for place, one in enumerate(order)}
        order, places = self._nexts[key]
        if node not in places or count < 2:
            return None
        return order[(places[node] + hop(self.neighbours, count, number)) % count]


@dataclass
class _Asked:
    """An exchange that this side has begun."""

    number: int
    peer: int
    began: float
    sent: bytearray | None = None
    answer: bytearray | None = None
    generation: int = 0
    step: int = 0


class VirtualExchange(MailboxExchange):
    """One node's exchange: the steps of `MemoryExchange`, between which virtual time passes.

    Real exchanges average chunk by chunk, each within one round trip of the whole exchange's time. Here all chunks are
    averaged as the middle one is: in a round trip of a chunk's length in the middle of the exchange. This matters:
    two exchanges that a node is in at once add up to more than a mean of three.
    """

    def __init__(self, ether: Ether, node: int, size: int) -> None:
        # the mailbox needs no file here: nobody else maps it, and a thousand of them would use up the descriptors
        self._file = -1
        self._open(size, Mailbox(-1, size))
        self.node, self._ether = node, ether
        self._averager = Averager(self._mailbox, size)
        self._view = View()
        self._asked: _Asked | None = None
        self._budget = self._ticks = self._number = 0
        self._initiated = self._finished = self._answered = self._failed = 0
        self._bytes_sent = self._bytes_received = 0
        self._last_s = self._total_s = self._distance = 0.0
        self._last_peer = -1
        self.endpoint = f"virtual://{node}"
        ether.open[node] = self

    def _wake(self) -> None:
        self._averager.poll()
        if self._mailbox.ticks != self._ticks:
            self._ticks, self._budget = self._mailbox.ticks, self._ether.per_step
        if self._budget and self._asked is None and self._averager.loaded:
            self._budget -= 1
            self._ask()

    # --- the side that asks

    def _ask(self) -> None:
        """Begin an exchange: both directions carry the weights at once, chunk by chunk."""
        ether, number = self._ether, self._number
        self._number += 1
        peer = ether.neighbour(self._view, self.node, number)
        if peer is None:
            return
        began = ether.clock.now
        self._asked = _Asked(number, peer, began)
        self._initiated += 1
        if peer not in ether.open:
            ether.clock.after(ether.timeout_s, lambda: self._fail(number))
            return
        ends = ether.carry(self.node, peer)
        half = min(ends - began, ether.chunk_s) / 2
        middle = (began + ends) / 2
        ether.clock.at(middle - half, lambda: self._send(number))
        ether.clock.at(middle, lambda: self._arrive(number))
        ether.clock.at(middle + half, lambda: self._settle_with(number))
        ether.clock.at(ends, lambda: self._end(number))

    def _current(self, number: int) -> _Asked | None:
        """The exchange of that number, if it is still under way."""
        asked = self._asked
        return asked if self.alive() and asked is not None and asked.number == number else None

    def _send(self, number: int) -> None:
        if (asked := self._current(number)) is not None:
            self._averager.poll()
            asked.sent = bytearray(4 * self._size)
            asked.generation, asked.step = self._averager.generation, self._averager.step
            self._averager.ask(0, asked.sent)
            self._bytes_sent += len(asked.sent)

    def _arrive(self, number: int) -> None:
        """The request is at the other side."""
        if (asked := self._current(number)) is None or asked.sent is None:
            return
        other = self._ether.open.get(asked.peer)
        asked.answer = None if other is None else other._answer(self.node, asked.sent)

    def _settle_with(self, number: int) -> None:
        """The answer is here, unless requests crossed: then the other one is answered instead."""
        if (asked := self._current(number)) is None or asked.answer is None or asked.sent is None:
            return
        self._averager.poll()
        if self._averager.generation == asked.generation:
            squares = self._averager.settle(0, asked.sent, asked.answer, asked.step)
            self._bytes_received += len(asked.answer)
            if not math.isnan(squares):
                self._distance = math.sqrt(squares / self._size)
        asked.sent = None

    def _end(self, number: int) -> None:
        if (asked := self._current(number)) is None:
            return
        self._asked = None
        self._finished += 1
        self._last_s, self._last_peer = self._ether.clock.now - asked.began, asked.peer
        self._total_s += self._last_s
        self._next()

    def _fail(self, number: int) -> None:
        if self._current(number) is not None:
            self._failed += 1
            self._asked = None
            self._next()

    def _next(self) -> None:
        self._wake()
        self._ether.news(self.node)

    # --- the side that answers

    def _answer(self, asker: int, message: bytearray) -> bytearray | None:
        """Average with a message; None if requests crossed and this node, the lower one, is being answered itself."""
        asked = self._asked
        if asked is not None and asked.sent is not None and asked.peer == asker and self.node < asker:
            return None
        self._averager.poll()
        if not self._averager.loaded:
            return None
        answer = bytearray(len(message))
        self._averager.answer(0, message, answer)
        self._answered += 1
        self._bytes_sent += len(answer)
        self._bytes_received += len(message)
        self._averager.poll()
        self._ether.news(self.node)
        return answer

    # --- the interface

    def set_view(self, view: View) -> None:
        """See `Exchange.set_view`."""
        self._view = view

    def fetch(self, timeout_s: float) -> torch.Tensor | None:
        """See `Exchange.fetch`; takes no virtual time."""
        for node in by_distance(self._view, self.node):
            peer = self._ether.open.get(node)
            if peer is not None and peer._averager.loaded:
                weights = peer._averager.weights(0).copy()
                if np.isfinite(weights).all():
                    return torch.from_numpy(weights)
        return None

    def stats(self) -> ExchangeStats:
        """See `Exchange.stats`; seconds are virtual."""
        return ExchangeStats(
            initiated=self._initiated,
            finished=self._finished,
            answered=self._answered,
            failed=self._failed,
            skipped_nonfinite=self._averager.skipped,
            last_s=self._last_s,
            mean_s=self._total_s / max(1, self._finished),
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            distance=self._distance,
            staleness=self._staleness,
            last_peer=self._last_peer,
        )

    def alive(self) -> bool:
        """See `Exchange.alive`."""
        return self._ether.open.get(self.node) is self

    def close(self) -> None:
        """See `Exchange.close`."""
        if self.alive():
            del self._ether.open[self.node]
