"""Starling's own engine: the real coordinator with leases, exchange and ring, and the sequence of its worker."""

import math
import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers.base import LR, Setup, System, await_file
from benchmarks.peers.emulation import EmulatedModel
from benchmarks.scaling_coordinator import coordinator_address, start_coordinator
from training.coordinator.node_client import NodeClient
from training.exchange import ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.learner.flat import FlatParameters
from training.node.node_exchange import NodeExchange
from training.node.process_group import NodeGroup
from training.processes.keys import RingKey
from training.strategies.gossip import GossipConfig

_BATCH, _SHARDS = 8, 96
_SHARD_S = 10.0
"""Seconds of a learner's work per shard: shards of real corpora last many steps."""


class Starling(System):
    """ADPSGD with one learner per node."""

    title = "Starling"
    joins = True

    def __init__(self, setup: Setup, model: EmulatedModel) -> None:
        super().__init__(setup, model)
        self.flat = FlatParameters(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        key = RingKey.load(await_file(setup.folder / "ring.key"))
        cfg, gossip = exchange_config(setup.exchange)
        exchange_setup = ExchangeSetup(
            node=setup.number,
            rank=0,
            size=self.flat.weights.numel(),
            key=key if cfg.encrypt else None,
            folder=setup.folder,
            gossip=gossip,
        )
        group = NodeGroup(0, 1, setup.folder / "unused", torch.device("cpu"))
        self.ring = NodeExchange(setup.number, group, self.flat, build_exchange(cfg, exchange_setup))
        await_file(setup.folder / "coordinator" / "coordinator.json")
        self.client = NodeClient(coordinator_address(setup.folder), key, setup.number, folder=setup.folder)
        self.steps = 0
        self._join()

    @classmethod
    def serve(cls, setup: Setup) -> None:
        """Run the coordinator."""
        train = {"strategy": "adpsgd", "nodes": setup.learners, "learners_per_node": 1}
        start_coordinator(setup.folder, train, _SHARDS, _per_shard(setup)).wait()

    def _join(self) -> None:
        reply = self.client.join(self.ring.endpoints())
        self.ring.set_view(reply.view)
        if reply.source == "neighbour" and not self.ring.take_from_neighbour():
            raise RuntimeError("no neighbour gave its weights")
        self.ring.start(0)
        self.client.begin(_cut, np.repeat(np.arange(_SHARDS), _per_shard(self.setup)))

    def step(self) -> bool:
        """Make a step like `training.node.worker.Worker`, with a batch of the lease."""
        view = self.client.view()
        if view.number != self.ring.view.number:
            self.ring.set_view(view)
        while (work := self.client.next()) is None:
            time.sleep(0.002)
        self.flat.zero_grad()
        self.model(None).backward()
        if ready := self.ring.ready():
            self.ring.average(ready)
        self.optimizer.step()
        self.steps += 1
        self.ring.after_step(self.steps)
        count = len(work.rows)
        self.client.trained(work, loss_sum=1.0, tokens=count, seconds=float(count), utterances=count)
        return True


def exchange_config(fields: Mapping[str, object]) -> tuple[ExchangeConfig, GossipConfig]:
    """Configurations of exchange and gossip; by default unencrypted, like the other systems.

    Raises:
        ValueError: A field is unknown, or its value is invalid.
    """
    gossip = {name: value for name, value in fields.items() if name in GossipConfig.model_fields and name != "kind"}
    others = {name: value for name, value in fields.items() if name not in gossip}
    return ExchangeConfig.model_validate({"encrypt": False, **others}), GossipConfig.model_validate(gossip)


def _per_shard(setup: Setup) -> int:
    """Utterances per shard."""
    return _BATCH * math.ceil(_SHARD_S / setup.step_s)


def _cut(_: int, rows: NDArray[np.int64], __: object) -> list[NDArray[np.int64]]:
    """Cut a lease into batches."""
    return [rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]
