"""This process's place in a ring: its connections, its membership, and the averaging of its weights."""

import hashlib
import json
import tempfile
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from training.coordinator.client import CoordinatorClient
from training.coordinator.epochs import ShardMap
from training.coordinator.messages import AveragedModel, CoordinatorUnreachableError, NamedData, NumberRequest
from training.coordinator.node_client import NodeClient
from training.coordinator.packing import Rows
from training.coordinator.worklist import Planner
from training.exchange import ExchangeSetup, build_exchange
from training.learner.flat import FlatParameters
from training.learner.moments import Moments
from training.node.collectives import NodeCollectives
from training.node.node_exchange import Facts, NodeExchange, NoWeightsError, RingMember
from training.processes.keys import RingKey
from training.processes.sockets import own_address
from training.ring.config import RingConfig
from training.ring.folder import RingFolder
from training.ring.group import torchrun_group
from training.strategies.requests import AllReduce

IDLE_S = 0.02
"""Seconds between two looks for work."""
CONNECT_TRIES = 3
CONNECT_S = 20.0
AGREED = 1e-4
"""Learners agree when the RMS difference to a neighbour is below this share of the weights' RMS."""
KEEP_UP = (
    "make steps longer (more rows a step) or messages smaller (RingConfig(exchange={'wire': 'bf16'})), or start the "
    "learners of a machine as one node with torchrun"
)
"""Remedy for too few exchanges a step."""
Orders = dict[str, Any]


class RingError(RuntimeError):
    """The ring cannot go on; the message says why."""


class RingLearner(RingMember):
    """A learner of a ring; arguments are those of `training.ring.ring.Ring`.

    Args:
        flat: The model's weights.
        moments: State of its optimizer.
        config: The ring's configuration.
        place: The ring's folder, or HOST:PORT of its coordinator.
        key_file: The coordinator's key, for an address.
        learners: Nodes to wait for at the start of training.

    Attributes:
        group: The learners of its node.
        client: Connection to the coordinator; at the node's first learner only.
        step: Steps that the node has made; for the exchange, looks at whether the learners agree are steps, too.
        looks: Number of these looks.
        joined: Whether it is a member with weights.
    """

    def __init__(
        self,
        flat: FlatParameters,
        moments: Moments,
        config: RingConfig,
        place: Path | str,
        key_file: Path | None,
        learners: int,
    ) -> None:
        self._flat, self._moments, self._config, self._learners = flat, moments, config, learners
        self._folder = RingFolder(place, config) if isinstance(place, Path) else None
        self._address, self._key_file = str(place), self._folder.key_file if self._folder else key_file
        self.joined, self.looks = False, 0
        self._ended = False
        self._planner: Planner = _no_plan
        self._shard_of_row: NDArray[np.integer[Any]] = ShardMap.from_counts([]).shard_of_row
        self._stack = ExitStack()
        try:
            self.group = torchrun_group(flat.weights.device)
            self._stack.callback(self.group.close)
            self._collectives = NodeCollectives(self.group)
            super().__init__(*self._connect())
        except BaseException:
            self._stack.close()
            raise

    # --- connections

    def _connect(self) -> tuple[NodeExchange, NodeClient | None]:
        """Connect to the coordinator, at rank 0, and start the exchange."""
        orders: Orders = {}
        logs = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="starling-ring-")))
        if self.group.rank == 0:
            if self._folder is not None:
                self._stack.callback(self._folder.close)
            orders = self._number()
        orders = self.group.tell(orders)
        address, node = str(orders["address"]), int(orders["node"])
        key, client = self._key(), None
        if self.group.rank == 0:
            client = NodeClient(address, key, node, folder=logs)
            client.model = self._model()
            self._stack.callback(client.close)
        start, stop = self.group.share(self._flat.weights.numel())
        newcomer = self._config.gossip.newcomer == "weights+optimizer"
        exchange_cfg = self._config.exchange
        if key is None:
            exchange_cfg = exchange_cfg.model_copy(update={"encrypt": False})
        setup = ExchangeSetup(
            node=node,
            rank=self.group.rank,
            size=stop - start,
            key=key if exchange_cfg.encrypt else None,
            folder=logs,
            bind_host=self._config.host or own_address(address),
            moments=len(self._moments.names) if newcomer else 0,
            optimizer=self._moments.optimizer,
            gossip=self._config.gossip,
        )
        exchange = build_exchange(exchange_cfg, setup)
        self._stack.callback(exchange.close)
        return NodeExchange(node, self.group, self._flat, exchange, self._moments, KEEP_UP), client

    def _number(self) -> Orders:
        """The coordinator's address, and a node number that no other learner has."""
        request, address = NumberRequest(token=uuid.uuid4().hex), self._address
        for _ in range(CONNECT_TRIES):
            if self._folder is not None:
                self._folder.close()
                address = self._folder.enter()
            try:
                with CoordinatorClient(address, self._key()) as client:
                    return {"address": address, "node": client.request(request, CONNECT_S).node}
            except CoordinatorUnreachableError as error:
                unreachable = error
                if self._folder is None:
                    break
        raise unreachable

    def _model(self) -> AveragedModel:
        """What this learner's neighbours must have in common with it."""
        flat, exchange = self._flat, self._config.exchange
        shapes = json.dumps([list(part.shape) for part in flat.averaged()])
        return AveragedModel(
            weights=flat.weights.numel(),
            shapes=hashlib.sha256(shapes.encode()).hexdigest(),
            learners=self.group.size,
            wire=exchange.wire,
            chunk_kb=exchange.chunk_kb,
        )

    def _key(self) -> RingKey | None:
        return RingKey.load(self._key_file) if self._key_file is not None else None

    # --- joining

    def train_on(self, data: NamedData, planner: Planner) -> None:
        """Ask for leases of a data set, from `join` on.

        Args:
            data: The data set.
            planner: Cuts leases into pieces.
        """
        self._shard_of_row, self._planner = ShardMap.from_counts(data.counts).shard_of_row, planner
        if self.client is not None:
            self.client.data = data

    @override
    def join(self, again: bool = False) -> None:
        try:
            super().join(again)
        except NoWeightsError as error:
            raise RingError(
                f"{error}: check that this machine reaches theirs (RingConfig.host), or end them"
            ) from error

    @override
    def _before_asking(self) -> None:
        if self._folder is not None:
            self._folder.enter()  # the last step may be long ago

    @override
    def _take_from_neighbour(self, facts: Facts) -> bool:
        # when training has ended, there is no step left for an optimizer
        return self.ring.take_from_neighbour(optimizer=not facts["finish"])

    @override
    def _set_weights(self, facts: Facts) -> None:
        if facts["finish"] and not self._ended:
            raise RingError(
                f"training has ended ({facts['finish']}), and no learner with its weights is left: take them from a "
                "learner that was there, or start another training (at an address, with Ring.serve(..., fresh=True))"
            )
        self._equalize()

    @override
    def _begin(self, facts: Facts) -> None:
        self.ring.start(self.step)
        if self.client is not None:
            self.client.begin(self._planner, self._shard_of_row)
        first, self.joined = not self.joined, True
        if first:
            self._await_learners()

    def _equalize(self) -> None:
        """Give a node's learners the weights of its first one."""
        if self.group.size > 1:
            op = AllReduce(self._flat.weights, float(self.group.rank == 0))
            self._flat.load(self._collectives.finish(self._collectives.begin(op)).vector)

    def _await_learners(self) -> None:
        patience_s = self._config.membership.start_patience_s
        while True:
            client, few = self.client, False
            if client is not None:
                progress = client.progress()
                few = (
                    progress.live - progress.newcomers < self._learners
                    and progress.elapsed < patience_s
                    and not client.finish()
                )
            if not self.group.any(few):
                return
            self.idle()
            self.follow()

    def follow(self) -> None:
        """Follow the coordinator: take over its view, rejoin after it dropped this node, restart it if it died."""
        client = self.client
        orders: Orders = {}
        if client is not None:
            if self._folder is not None:
                self._folder.revive()
            if client.dropped():
                orders = {"rejoin": True}
            elif (view := client.view()).number != self.ring.view.number:
                orders = {"view": view.to_dict()}
        orders = self.group.tell(orders)
        if "rejoin" in orders:
            self.join(again=True)
        elif "view" in orders:
            self.set_view(orders)

    # --- averaging

    def reduce(self, weight: float) -> None:
        """Average the gradients over the learners of the node.

        Args:
            weight: Weight of this learner's gradient; one of weight 0 may be NaN.
        """
        if self.group.size > 1:
            self._flat.gather_grads()
            op = AllReduce(self._flat.grads, weight)
            self._flat.grads.copy_(self._collectives.finish(self._collectives.begin(op)).vector)

    def average(self) -> None:
        """Apply the averages that have arrived."""
        ready = self.ring.ready()
        if self.group.any(ready):
            self.ring.average(ready)

    def after_step(self) -> None:
        """Count a step, and offer its weights to the neighbours.

        Raises:
            ExchangeError: If the exchange has died.
        """
        self.step += 1
        self.ring.after_step(self.step)

    def idle(self) -> None:
        """Wait a moment, and apply the neighbours' averages meanwhile."""
        time.sleep(IDLE_S)
        self.ring.idle(self.step)

    def settle(self) -> None:
        """Go on averaging until the learners' weights agree, and newcomers have them, for at most `settle_s`."""
        self._ended = True
        deadline, agreed = time.monotonic() + self._config.settle_s, 0
        stats = self.ring.stats()
        counted = stats.finished if stats is not None else 0
        while True:
            stats = self.ring.stats()
            others = len(self.ring.view.without(self.ring.node).members)
            scale = float(self._flat.weights.square().mean().sqrt())
            # each exchange counts once, and none from before: its distance may be older than the last gradients
            if stats is not None and stats.finished > counted:
                counted = stats.finished
                agreed = agreed + 1 if stats.distance <= AGREED * scale else 0
            newcomers = self.client.progress().newcomers if self.client is not None else 0
            alike = not newcomers and (not others or agreed > 2 * others)
            if self.group.all(alike or time.monotonic() > deadline):
                return
            time.sleep(IDLE_S)
            self.average()
            self.after_step()
            self.looks += 1
            self.follow()

    def close(self) -> None:
        """Leave the ring."""
        client, self.client = self.client, None
        if client is not None:
            client.leave()
        self._stack.close()


def _no_plan(_: int, __: Rows, ___: str) -> list[Rows]:
    raise AssertionError("a learner that asks for no leases gets none")
