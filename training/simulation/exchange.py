"""The exchange of weights in virtual time: the real protocol and averaging, with messages that the clock delivers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from training.coordinator.membership import View
from training.exchange.averaging import Averager
from training.exchange.base import ExchangeStats
from training.exchange.client import MailboxExchange
from training.exchange.messages import Header, chunk_weights
from training.exchange.neighbours import Kind, by_distance, hop, resolve, ring_order
from training.exchange.protocol import Asking, Pending, Protocol, Report
from training.simulation.clock import Clock
from training.simulation.network import LinkModel

_CHUNK_KB = 1024
"""Maximum size of a chunk, the default of `ExchangeConfig.chunk_kb`."""
_RINGS = 64
"""Number of random rings in the cache; if learners are more exchanges apart, a ring is shuffled again."""


@dataclass
class VirtualNetwork:
    """The network that the exchanges of a simulation share.

    Attributes:
        clock: Virtual time.
        links: Model of the messages' cost.
        ranks: The learner of each node that exchanges for it.
        neighbours: How a node chooses its neighbours.
        seed: Seed of the random ring.
        per_step: Maximum number of exchanges that a node starts per step.
        num_bytes: Size of the weights on the wire.
        timeout_s: Seconds after which a silent neighbour is given up.
        news: Called with a node when its exchange has news.
    """

    clock: Clock
    links: LinkModel
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
        """Round trip time of a chunk, seconds."""
        cluster = self.links.cluster
        chunk = 4 * chunk_weights(int(self.num_bytes / 4), _CHUNK_KB)
        return 2 * (cluster.link_ms / 1e3 + chunk / (cluster.link_gbit * 1e9 / 8))

    def carry(self, node: int, peer: int) -> float:
        """Send the weights in both directions; returns the time when the last chunk is back."""
        here, there = self.ranks[node], self.ranks[peer]
        last = max(self.links.send(here, there, self.num_bytes), self.links.send(there, here, self.num_bytes))
        return last + self.chunk_s / 2

    def neighbour(self, view: View, node: int, number: int) -> int | None:
        """Same as `training.exchange.neighbours.neighbour`, but a ring is shuffled once, not once per node."""
        count = len(view.nodes)
        shuffled = resolve(self.neighbours, count) == "random-ring"
        key = (view.number, number if shuffled else 0)
        if key not in self._nexts:
            if len(self._nexts) >= _RINGS:
                del self._nexts[next(iter(self._nexts))]
            order = ring_order(self.neighbours, view, number, self.seed)
            self._nexts[key] = order, {member: place for place, member in enumerate(order)}
        order, places = self._nexts[key]
        if node not in places or count < 2:
            return None
        return order[(places[node] + hop(self.neighbours, count, number)) % count]


class _Times(NamedTuple):
    """Times when the middle chunk is at the other side, when its answer is back, and when the last answer is."""

    there: float
    back: float
    ends: float


class VirtualExchange(MailboxExchange):
    """One node's exchange: the protocol of the real ones, with messages in virtual time.

    Real exchanges average chunk by chunk, each chunk within one round trip somewhere in the exchange's duration. Here
    all chunks are averaged like the middle one: within one round trip of a chunk in the middle of the exchange. This
    matters: two exchanges of a node that overlap move its weights further than the mean of all three nodes.
    """

    def __init__(self, network: VirtualNetwork, node: int, size: int) -> None:
        super().__init__(size, shared=False)  # files for a thousand nodes would exceed the limit of open files
        self.node, self._network = node, network
        self._averager = Averager(self._mailbox, size)
        self._report = Report(self._mailbox)
        self._protocol = Protocol(node, self._mailbox, self._averager, self._report, network.per_step)
        self.endpoint = f"virtual://{node}"
        network.open[node] = self

    def _wake(self) -> None:
        self._protocol.poll()
        self._protocol.new_step()
        if self._protocol.may_begin:
            self._ask()

    # --- the requesting side

    def _ask(self) -> None:
        """Start an exchange: the weights travel in both directions at once, chunk by chunk."""
        network, protocol = self._network, self._protocol
        peer = network.neighbour(protocol.view, self.node, protocol.number)
        protocol.number += 1
        if peer is None:
            protocol.pass_over()
            return
        began = network.clock.now
        asking = protocol.begin(peer, Pending(), began)
        if peer not in network.open:
            network.clock.after(network.timeout_s, lambda: self._fail(asking))
            return
        ends = network.carry(self.node, peer)
        half = min(ends - began, network.chunk_s) / 2
        times = _Times((began + ends) / 2, min((began + ends) / 2 + half, ends), ends)
        network.clock.at(times.there - half, lambda: self._send(asking, times))

    def _under_way(self, asking: Asking) -> bool:
        """Whether an exchange that this node started is still in progress."""
        return self.alive() and self._protocol.asking is asking

    def _send(self, asking: Asking, times: _Times) -> None:
        """Send the middle chunk."""
        self._protocol.poll()
        if self._under_way(asking) and (request := self._protocol.next_request()) is not None:
            self._protocol.sent(request)
            message = bytearray(request.chunk)
            self._network.clock.at(times.there, lambda: self._arrive(asking, request.header, message, times))

    def _arrive(self, asking: Asking, request: Header, message: bytearray, times: _Times) -> None:
        """Deliver the middle chunk to the other side, if that still exists."""
        other, clock = self._network.open.get(asking.node), self._network.clock
        if other is not None:
            answer = other._answer(request, message)
            clock.at(times.back, lambda: self._hear(asking, answer, message))
        clock.at(times.ends, lambda: self._end(asking))

    def _hear(self, asking: Asking, answer: Header, message: bytearray) -> None:
        """Receive the answer to the middle chunk."""
        if not self.alive():
            return
        self._protocol.poll()
        if self._protocol.hear(asking.pending, answer, message, self._network.clock.now) == "refused":
            self._next()

    def _end(self, asking: Asking) -> None:
        """End the exchange with its last chunk; it has failed if the middle one was not answered."""
        if not self._under_way(asking):
            return
        if self._protocol.complete:
            self._protocol.finish(self._network.clock.now - asking.began)
        else:
            self._protocol.give_up()
        self._next()

    def _fail(self, asking: Asking) -> None:
        if self._under_way(asking):
            self._protocol.give_up()
            self._next()

    def _next(self) -> None:
        self._wake()
        self._network.news(self.node)

    # --- the answering side

    def _answer(self, request: Header, message: bytearray) -> Header:
        """Answer a request; the answer's chunk replaces the request's in `message`."""
        self._protocol.poll()
        answer = self._protocol.answer(request, message)
        self._protocol.poll()
        self._network.news(self.node)
        return answer

    # --- the interface

    @override
    def set_view(self, view: View) -> None:
        self._protocol.view = view

    @override
    def fetch(self, timeout_s: float) -> torch.Tensor | None:
        # takes no virtual time
        for node in by_distance(self._protocol.view, self.node):
            peer = self._network.open.get(node)
            if peer is not None and peer._averager.loaded:
                weights = peer._averager.weights(0).copy()
                if np.isfinite(weights).all():
                    return torch.from_numpy(weights)
        return None

    @override
    def stats(self) -> ExchangeStats:
        # seconds are virtual; neither CPU time nor silence is simulated
        self._report.publish(self._network.clock.now, self._averager)
        return replace(super().stats(), cpu_seconds=0.0, silent_s=0.0)

    @override
    def alive(self) -> bool:
        return self._network.open.get(self.node) is self

    @override
    def close(self) -> None:
        if self.alive():
            del self._network.open[self.node]
