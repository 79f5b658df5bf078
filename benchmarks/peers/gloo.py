"""AD-PSGD over torch.distributed, as it is often published: fixed pairs that exchange in turn.

Both sides of a pair must take part at the same time, so the edges of the ring are coloured: all edges of one colour are
disjoint and can exchange concurrently. An even ring needs two colours, an odd one three, and all nodes go through the
colours in the same order, so no ring size deadlocks. Every turn needs a permit (a step) of both sides. So a slow node's
neighbours exchange as rarely as it does, but keep computing. Nodes cannot join, and the first lost node ends the ring.
Averaging and the training process's side are Starling's own.
"""

import datetime
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import override

from benchmarks.peers.base import LR, Setup, System
from benchmarks.peers.emulation import EmulatedModel
from training.exchange import ExchangeSetup
from training.exchange.averaging import Averager
from training.exchange.client import ProcessExchange
from training.exchange.config import ExchangeConfig
from training.exchange.control import Control
from training.exchange.daemon import main
from training.exchange.mailbox import Mailbox
from training.exchange.protocol import ChunkRequest, Pending, Protocol, Report
from training.learner.flat import FlatParameters
from training.processes.children import exit_at_once

_MEET_S = 120.0  # time for all nodes to connect, and for a partner to take its turn
_BEAT_S = 0.05
_STALLED = 17
_HELLO = 1 << 20
_WINDOW = 2  # chunks in flight: one ahead of the arithmetic


def colours(nodes: int) -> list[list[tuple[int, int]]]:
    """Edge colouring of a ring: groups of edges that share no node.

    Args:
        nodes: Number of nodes in the ring, at least 1.
    """
    if nodes < 2:
        return []
    if nodes == 2:
        return [[(0, 1)]]
    edges = [(node, (node + 1) % nodes) for node in range(nodes)]
    groups = [edges[0 : nodes - nodes % 2 : 2], edges[1:nodes:2], edges[nodes - 1 :] if nodes % 2 else []]
    return [group for group in groups if group]


def partners(nodes: int, node: int) -> list[int | None]:
    """A node's partner in each turn of a round; None for turns without a partner."""
    met: list[int | None] = []
    for group in colours(nodes):
        pair = next((pair for pair in group if node in pair), None)
        met.append(None if pair is None else pair[0] + pair[1] - node)
    return met


class GlooExchange(ProcessExchange):
    """An exchange whose daemon averages with two fixed neighbours in turn; it ends with the first node that leaves.

    Args:
        cfg: Configuration without encryption.
        setup: As for other exchanges.
        store: Host and port of a `torch.distributed.TCPStore` that the first node's daemon serves, or the path of a
            `FileStore`.
        nodes: Number of nodes in the ring; they are numbered 0 to nodes - 1.
    """

    daemon = "benchmarks.peers.gloo"

    def __init__(self, cfg: ExchangeConfig, setup: ExchangeSetup, store: str, nodes: int) -> None:
        self._ring = {"store": store, "nodes": nodes}
        super().__init__(cfg, setup)

    @override
    def _message(self, cfg: ExchangeConfig, setup: ExchangeSetup) -> dict[str, Any]:
        return super()._message(cfg, setup) | {"rendezvous": self._ring}


class Gloo(System):
    """AD-PSGD with one learner per node, averaged by `GlooExchange`."""

    title = "AD-PSGD over Gloo"

    def __init__(self, setup: Setup, model: EmulatedModel) -> None:
        super().__init__(setup, model)
        self.flat = FlatParameters(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        exchange_setup = ExchangeSetup(setup.number, 0, self.flat.weights.numel(), folder=setup.folder)
        store = f"127.0.0.1:{setup.ports[0]}"
        self.exchange = GlooExchange(ExchangeConfig(encrypt=False), exchange_setup, store, setup.learners)
        self.exchange.start(self.flat.weights, 0)
        self.steps = 0

    @override
    def step(self) -> bool:
        self.flat.zero_grad()
        self.model(None).backward()
        exchange, alive = self.exchange, self.exchange.alive()
        if alive and exchange.ready():
            with torch.no_grad(), exchange.taken() as delta:
                self.flat.weights.add_(delta)
        self.optimizer.step()
        self.steps += 1
        if alive:
            exchange.offer(self.flat.weights, self.steps)
        return True


# --- the daemon


def serve(setup: dict[str, Any], mailbox: Mailbox, control: Control) -> int:
    """Serve a mailbox until the training process closes its end, or a neighbour is lost."""
    control.send({"listening": f"gloo://{setup['node']}.{setup['rank']}"})  # no node connects to this endpoint
    daemon = GlooDaemon(setup, mailbox, control)
    exit_at_once(daemon.run())  # Gloo's threads may wait for other nodes forever


class GlooDaemon:
    """Exchanges with its neighbours in turn, as long as the training process grants permits."""

    def __init__(self, setup: dict[str, Any], mailbox: Mailbox, control: Control) -> None:
        self._setup, self._mailbox, self._control = setup, mailbox, control
        self._node, self._timeout_s = int(setup["node"]), float(setup["timeout_s"])
        self._averager = Averager(mailbox, int(setup["chunk"]), setup["wire"])
        self._report = Report(mailbox)
        self._protocol = Protocol(self._node, mailbox, self._averager, self._report, int(setup["per_step"]), _WINDOW)
        self._partners = partners(int(setup["rendezvous"]["nodes"]), self._node)
        self._watch = Watchdog()

    def run(self) -> int:
        """Serve the exchange; returns the exit status."""
        torch.set_num_threads(1)
        joined = not self._partners
        while not self._control.closed:
            for command in self._control.receive():
                if "fetch" in command:
                    why = "a fixed ring has no newcomers"
                    self._control.send({"fetched": command["fetch"], "ok": False, "node": -1, "why": why})
            self._averager.poll()
            self._report.write(time.monotonic(), self._averager)
            self._protocol.new_step()
            if not (self._protocol.may_begin and self._partners):
                self._control.wait(_BEAT_S)
                continue
            try:
                if not joined:
                    self._join()
                    joined = True
                self._meet()
            except RuntimeError as error:
                logging.error("a neighbour is lost, and a fixed ring cannot continue without it: %s", error)
                self._report.failed += 1
                self._report.write(math.inf, self._averager)
                return 1
        return 0

    def _join(self) -> None:
        """Join the process group of all nodes."""
        rendezvous = self._setup["rendezvous"]
        limit = datetime.timedelta(seconds=_MEET_S)
        host, _, port = rendezvous["store"].rpartition(":")
        store: Any
        if port.isdigit():
            store = dist.TCPStore(host, int(port), None, self._node == 0, limit, wait_for_workers=False)  # type: ignore[attr-defined]
        else:
            store = dist.FileStore(rendezvous["store"], rendezvous["nodes"])  # type: ignore[attr-defined]
        prefix = dist.PrefixStore(f"rank-{self._setup['rank']}", store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=prefix, rank=self._node, world_size=rendezvous["nodes"], timeout=limit)

    def _meet(self) -> None:
        """Run the next turn: each side treats the other's chunks as answers to its own."""
        protocol = self._protocol
        peer = self._partners[protocol.number % len(self._partners)]
        protocol.number += 1
        if peer is None:
            protocol.pass_over()
            return
        self._greet(peer)
        asking = protocol.begin(peer, Pending(lambda length: np.empty(length, np.uint8)), time.monotonic())
        underway: deque[tuple[ChunkRequest, NDArray[np.uint8], list[dist.Work]]] = deque()
        with self._watch.limit(self._timeout_s) as alarm:
            while not protocol.complete:
                # weights may be replaced in the middle, but the other side still waits for all chunks
                self._averager.poll()
                while (request := protocol.next_request()) is not None:
                    protocol.sent(request)
                    underway.append((request, *self._swap(request, peer)))
                request, theirs, works = underway.popleft()
                for work in works:
                    work.wait()
                alarm()
                self._averager.poll()
                protocol.hear(asking.pending, request.header, theirs, time.monotonic())
        self._report.answered(0, last=True)
        protocol.finish(time.monotonic() - asking.began)

    def _greet(self, peer: int) -> None:
        """Wait for the partner, and serve the training process in the meantime."""
        ours, theirs = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        works = [dist.isend(ours, peer, tag=_HELLO), dist.irecv(theirs, peer, tag=_HELLO)]
        errors: list[RuntimeError] = []

        def wait() -> None:
            try:
                for work in works:
                    if work is not None:
                        work.wait()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        with self._watch.limit(_MEET_S):
            while thread.is_alive():
                thread.join(0.002)
                self._averager.poll()
                self._report.write(time.monotonic(), self._averager)
                self._control.receive()
                if self._control.closed:
                    os._exit(0)  # the thread that waits for the partner cannot be cancelled
        if errors:
            raise errors[0]

    def _swap(self, request: ChunkRequest, peer: int) -> "tuple[NDArray[np.uint8], list[dist.Work]]":
        """Start to send a chunk and to receive the partner's."""
        theirs = np.empty(len(request.chunk), np.uint8)
        out, into = torch.from_numpy(request.chunk), torch.from_numpy(theirs)
        index = request.header.index
        works = [dist.isend(out, peer, tag=index), dist.irecv(into, peer, tag=index)]
        return theirs, [work for work in works if work is not None]


class Watchdog:
    """Ends this process when an exchange stalls: Gloo itself may wait for a dead peer far beyond its time-out."""

    def __init__(self) -> None:
        self._deadline = math.inf
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[Any]:
        """Limit the duration of a block; calling the yielded function restarts the timer."""

        def again() -> None:
            self._deadline = time.monotonic() + seconds

        again()
        try:
            yield again
        finally:
            self._deadline = math.inf

    def _run(self) -> None:
        while True:
            time.sleep(0.1)
            if time.monotonic() > self._deadline:
                logging.error("a neighbour does not respond: the fixed ring ends")
                os._exit(_STALLED)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], serve))
