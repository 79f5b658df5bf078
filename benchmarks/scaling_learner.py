"""One learner of `benchmarks.scaling`: the training loop with real exchanges and leases; gradients are waits.

It makes the same calls in the same order as `training.node.worker.Worker`; forward and backward are `time.sleep`, the
gradient is constant. Its progress is on a board in shared memory, so that it may be killed at any time.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks import netns
from benchmarks.board import Board
from training.coordinator.membership import View
from training.coordinator.messages import JoinReply
from training.coordinator.node_client import NodeClient
from training.coordinator.worklist import Assignment
from training.exchange import Exchange, ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.node.process_group import NodeGroup
from training.processes.children import end_with_parent
from training.processes.keys import RingKey
from training.strategies.gossip import GossipConfig

IDLE_S = 0.02


@dataclass(frozen=True)
class Setup:
    """Parameters of a learner.

    Attributes:
        node: Its node.
        rank: Its rank in the node.
        nodes: Number of nodes in the ring.
        ranks: Number of ranks per node.
        params: Number of weights of the model.
        step_s: Seconds per gradient, including the slow-down.
        batch: Utterances per step of one learner.
        shard: Shard of each row [rows].
        exchange: Exchange between nodes.
        gossip: Neighbours with which nodes average.
        coordinator: HOST:PORT of the coordinator.
        key: The ring's key.
        folder: Folder for logs and rendezvous files.
        host: Address to listen on.
        namespace: Descriptor of its network namespace; None for the machine's own network.
        apart: Whether its node's ranks are on several machines.
    """

    node: int
    rank: int
    nodes: int
    ranks: int
    params: int
    step_s: float
    batch: int
    shard: NDArray[np.int64]
    exchange: ExchangeConfig
    gossip: GossipConfig
    coordinator: str
    key: Path
    folder: Path
    host: str = "127.0.0.1"
    namespace: int | None = None
    apart: bool = False


def run(setup: Setup, board: Board, start: Any, parent: int) -> None:
    """Train until killed; errors are logged in the folder.

    Args:
        setup: Parameters of the learner.
        board: Board for its progress.
        start: Event that is set when all learners are ready.
        parent: Process id of the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)
    with (setup.folder / f"learner-{setup.node}.{setup.rank}.log").open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    torch.set_num_threads(1)
    if setup.namespace is not None:
        netns.enter(setup.namespace)
    if setup.apart:
        os.environ["GLOO_SOCKET_IFNAME"] = netns.DEVICE
    try:
        _Learner(setup, board).train(start)
    except BaseException:
        logging.exception("this learner has failed")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


class _Learner:
    def __init__(self, setup: Setup, board: Board) -> None:
        self.setup, self.board, self.step = setup, board, 0
        meeting = setup.folder / f"meet-{setup.node}"
        self.group = NodeGroup(setup.rank, setup.ranks, meeting, torch.device("cpu"))
        self.weights = torch.full((setup.params,), float(setup.node))
        self.grads = torch.empty(setup.params)
        first, last = self.group.share(setup.params)
        self.mine = self.weights[first:last]
        key = RingKey.load(setup.key)
        self.exchange = self._exchange(key) if setup.nodes > 1 else None
        self.client = NodeClient(setup.coordinator, key, setup.node, folder=setup.folder) if setup.rank == 0 else None
        self.view = View()
        self.work: Assignment | None = None
        self._done: set[tuple[str, int]] = set()

    def _exchange(self, key: RingKey) -> Exchange:
        setup = self.setup
        return build_exchange(
            setup.exchange,
            ExchangeSetup(
                node=setup.node,
                rank=setup.rank,
                size=self.mine.numel(),
                key=key if setup.exchange.encrypt else None,
                folder=setup.folder,
                bind_host=setup.host,
                gossip=setup.gossip,
            ),
        )

    def train(self, start: Any) -> None:
        self._join()
        self.board.set_ready()
        start.wait(120)
        while True:
            orders = self.group.tell(self._decide() if self.group.rank == 0 else {})
            if orders["do"] == "end":
                return
            {"step": self._step, "wait": self._wait, "view": self._set_view}[str(orders["do"])](orders)

    def _join(self) -> None:
        endpoints = tuple(self.group.gather_text(self.exchange.endpoint if self.exchange else ""))
        reply: JoinReply | None = self.client.join(endpoints) if self.client else None
        self._set_view(self.group.tell({"view": reply.view.to_dict()} if reply else {}))
        if self.exchange:
            self.exchange.start(self.mine, 0)
        if self.client:
            size = self.setup.batch * self.setup.ranks
            self.client.begin(
                lambda _, rows, __: [rows[at : at + size] for at in range(0, len(rows), size)], self.setup.shard
            )

    def _decide(self) -> dict[str, Any]:
        client = self.client
        assert client is not None
        if client.dropped():
            raise RuntimeError("the coordinator has dropped this node")
        self._leave_traces(client)
        if client.finish():
            return {"do": "end"}
        view = client.view()
        if view.number != self.view.number:
            return {"do": "view", "view": view.to_dict()}
        self.work = client.next()
        return {"do": "step" if self.work is not None else "wait"}

    def _leave_traces(self, client: NodeClient) -> None:
        """Report snapshots and checkpoints as written: the cost of storage is not measured here."""
        epoch, checkpoint = client.snapshot_wanted(), client.checkpoint_wanted()
        if epoch is not None and ("epoch", epoch) not in self._done:
            self._done.add(("epoch", epoch))
            client.snapshot_written(epoch)
        if checkpoint is not None and ("checkpoint", checkpoint) not in self._done:
            self._done.add(("checkpoint", checkpoint))
            client.checkpoint_done(
                checkpoint, {"node": self.setup.node, "step": self.step, "seq": client.seq, "files": {}}
            )

    def _set_view(self, orders: Mapping[str, Any]) -> None:
        self.view = View.from_dict(orders["view"])
        if self.exchange:
            self.exchange.set_view(self.view)

    def _wait(self, _: Mapping[str, Any]) -> None:
        time.sleep(IDLE_S)

    def _step(self, _: Mapping[str, Any]) -> None:
        time.sleep(self.setup.step_s)
        self.grads.fill_(1e-6 * (1 + self.setup.node))
        if self.group.size > 1:
            dist.all_reduce(self.grads)
        if self._all_ready():
            self._average()
        self.weights.sub_(self.grads)
        self.step += 1
        if self.exchange:
            self.exchange.offer(self.mine, self.step)
            self.board.note(self.exchange)
        if self.client and self.work is not None:
            count = len(self.work.rows)
            self.client.trained(self.work, loss_sum=1.0, tokens=count, seconds=float(count), utterances=count)
        self.board.step()

    def _all_ready(self) -> bool:
        ready = self.exchange is not None and self.exchange.ready()
        # the same count of numbers as the worker gathers for losses and the exchange's figures
        return all(part[0] for part in self.group.gather_numbers([float(ready), *[0.0] * 8]))

    def _average(self) -> None:
        assert self.exchange is not None
        with self.exchange.taken() as delta:
            self.weights.add_(self.group.gather_shares(delta, self.weights.numel()))
