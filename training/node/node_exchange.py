"""A node's place in the ring: how it joins, and how its weights are averaged with those of other nodes.

Each rank exchanges its own share of the weights with the same rank of other nodes. An all-gather within the node
distributes the results, so averaging uses every rank's link.
"""

import logging
import time
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from training.coordinator.membership import View
from training.coordinator.node_client import NodeClient
from training.exchange.base import Exchange, ExchangeError, ExchangeStats
from training.learner.checkpoint import CheckpointError
from training.learner.flat import FlatParameters
from training.learner.moments import Moments
from training.node.process_group import NodeGroup

log = logging.getLogger(__name__)
JOIN_S = 120.0
"""Seconds that a node asks for weights to start from; then it gives up."""
RETRY_S = 0.5
FETCH_S = 30.0
"""Seconds that a newcomer waits for a neighbour's weights, per attempt."""
FETCH_TRIES = 2
REPLICA_S = 60.0
"""Seconds that it waits for weights and optimizer state, which a neighbour copies after its next step."""
_RATE_STEPS = 50
_DEFICIT = 0.8
KEEP_UP = "make steps longer (train.batch_seconds) or messages smaller (exchange.wire=bf16), or use h-adpsgd"
"""Remedy for too few exchanges a step, in terms of the pipeline's configuration."""
Facts = dict[str, Any]
"""What the coordinator tells a node that joins (`JoinReply.facts`)."""


class NoWeightsError(RuntimeError):
    """A node that joined found no weights to start from."""


class ExchangeRate:
    """Successful exchanges of a rank per step; warns once if there are too few.

    Args:
        name: Name of the learner.
        remedy: What the warning advises.

    Attributes:
        per_step: Running mean over about the last fifty steps; 0 at the start.
    """

    def __init__(self, name: str, remedy: str = KEEP_UP) -> None:
        self.per_step = 0.0
        self._remedy = remedy
        self._name, self._steps, self._finished, self._warned = name, 0, 0, False

    def step(self, finished: int) -> None:
        """Count a step.

        Args:
            finished: Successful exchanges so far; a restarted daemon counts from 0.
        """
        ended, self._finished = max(0, finished - self._finished), finished
        self._steps += 1
        self.per_step += (ended - self.per_step) / min(self._steps, _RATE_STEPS)
        if self._steps > _RATE_STEPS and self.per_step < _DEFICIT and not self._warned:
            self._warned = True
            logging.warning(
                "learner %s finishes %.2f exchanges a step: with less than one, replicas drift apart; %s",
                self._name,
                self.per_step,
                self._remedy,
            )


class NodeExchange:
    """Averages a node's weights with its neighbours'; does nothing if there is only one node.

    Args:
        node: Number of the node.
        group: The node's ranks.
        flat: Its weights.
        exchange: This rank's exchange; None if there is only one node.
        moments: State of the optimizer, for newcomers that take it.
        remedy: What to do if exchanges do not keep up with steps.
    """

    def __init__(
        self,
        node: int,
        group: NodeGroup,
        flat: FlatParameters,
        exchange: Exchange | None,
        moments: Moments | None = None,
        remedy: str = KEEP_UP,
    ) -> None:
        self._moments = moments if moments is not None and exchange is not None and exchange.moments else None
        self.node, self.group, self.flat, self.exchange = node, group, flat, exchange
        self.view = View()
        self.averaging_s = 0.0
        """Seconds that the last averaging took of the training step."""
        self.rate = ExchangeRate(f"{node}.{group.rank}", remedy)
        self._part = group.share(flat.weights.numel())

    def endpoints(self) -> tuple[str, ...]:
        """Addresses of the node's exchanges, in rank order."""
        return tuple(self.group.gather_text(self.exchange.endpoint if self.exchange else ""))

    def set_view(self, view: View) -> None:
        """Set the nodes that take part from now on."""
        self.view = view
        if self.exchange:
            self.exchange.set_view(view)

    def start(self, step: int) -> None:
        """Start exchanging, with the current weights."""
        if self.exchange:
            self.exchange.start(self._mine(), step)

    def _mine(self) -> Tensor:
        """This rank's share of the weights."""
        start, stop = self._part
        return self.flat.weights[start:stop]

    def take_from_neighbour(self, optimizer: bool = True) -> bool:
        """Replace the weights by a live neighbour's, each rank its share; False if no neighbour has finite weights.

        Args:
            optimizer: Whether to take the optimizer's state as well, if that is configured and a neighbour offers it.
        """
        return (optimizer and self._take_replica()) or self._take_weights()

    def _take_replica(self) -> bool:
        """Take a neighbour's weights and optimizer state, both of the same step; False if none is available."""
        if self._moments is None or self.exchange is None:
            return False
        replica = self.exchange.fetch_replica(REPLICA_S)
        if not self.group.all(replica is not None) or replica is None:
            return False
        flat, group = self.flat, self.group
        rows = replica.rows.to(flat.weights.device)
        whole = torch.stack([group.gather_shares(row, flat.weights.numel()) for row in rows])
        # the neighbour's ranks may have answered at different steps, but the ranks here must agree
        steps = max(numbers[0] for numbers in group.gather_numbers([replica.steps]))
        flat.load(whole[0])
        self._moments.load(whole[1:], steps)
        logging.info("learner %d.%d: a neighbour's optimizer state after %d steps", self.node, group.rank, steps)
        return True

    def _take_weights(self) -> bool:
        part = None
        for _ in range(FETCH_TRIES):
            part = self.exchange.fetch(FETCH_S) if self.exchange else None
            if self.group.all(part is not None and bool(torch.isfinite(part).all())):
                break
            part = None
            if not self.exchange or not self.view.without(self.node).members:
                break
            time.sleep(1.0)
        if part is None:
            return False
        self.flat.load(self.group.gather_shares(part.to(self.flat.weights.device), self.flat.weights.numel()))
        return True

    def ready(self) -> bool:
        """Collect this rank's averaging results, right before an update; returns whether there are any."""
        return self.exchange is not None and self.exchange.alive() and self.exchange.ready()

    @torch.no_grad()
    def average(self, ready: bool) -> None:
        """Add the results of all ranks' exchanges (half the difference to each neighbour) to the live weights.

        Args:
            ready: Whether this rank has a result; all ranks call this together if any of them has one.
        """
        started = time.monotonic()
        self._add(ready)
        # If a busy daemon was late for the last update, the first delta was that one's: add what came since, too.
        if self.group.size == 1 and self.ready():
            self._add(True)
        self.averaging_s = time.monotonic() - started

    def _add(self, ready: bool) -> None:
        assert self.exchange is not None
        weights = self.flat.weights
        with self.exchange.taken() if ready else nullcontext(torch.zeros_like(self._mine())) as delta:
            weights.add_(self.group.gather_shares(delta.to(weights.device), weights.numel()))

    def after_step(self, step: int, average: bool = True) -> None:
        """Offer the weights after a step, and unless averaging pauses, allow further exchanges.

        Args:
            step: Number of the step.
            average: Whether weights are averaged while the next gradient is computed.

        Raises:
            ExchangeError: If the exchange has died. The node then restarts its processes, which rejoin the ring.
        """
        if self.exchange is None:
            return
        if not self.exchange.alive():
            raise ExchangeError(f"the exchange of node {self.node} rank {self.group.rank} has ended by itself")
        self.exchange.offer(self._mine(), step, average=average)
        self._give_replica()
        if average and self.view.without(self.node).members:
            self.rate.step(self.exchange.stats().finished // self.exchange.parts)

    def idle(self, step: int, average: bool = True) -> None:
        """Called while there is nothing to train: unless averaging pauses, add what neighbours' exchanges bring.

        The simulator does this at the end of training only (`training.simulation.gradients`): there a learner waits for
        events, here its ranks ask together, now and then.
        """
        if average and self.exchange is not None and self.group.any(ready := self.ready()):
            self.average(ready)
            self.exchange.give(self._mine(), step)
        self._give_replica()

    @torch.no_grad()
    def _give_replica(self) -> None:
        """If a newcomer waits for a replica, copy weights and optimizer state of this step to the daemon's memory."""
        if self._moments is None or self.exchange is None:
            return
        slot = self.exchange.replica_slot()
        if slot is not None:
            slot[0].copy_(self._mine())
            self.exchange.give_replica(self._moments.write(slot[1:], *self._part))

    def stats(self) -> ExchangeStats | None:
        """Statistics of this rank's exchange."""
        return self.exchange.stats() if self.exchange else None


class RingMember(ABC):
    """A rank of a node that joins the ring, and joins again if the coordinator dropped it.

    Args:
        ring: The node's ranks, and its exchange with other nodes.
        client: Connection to the coordinator; at rank 0 only.

    Attributes:
        step: Steps that the node has made.
    """

    def __init__(self, ring: NodeExchange, client: NodeClient | None) -> None:
        self.ring, self.client, self.step = ring, client, 0

    def join(self, again: bool = False) -> None:
        """Become a member with weights, those that the coordinator names; all ranks call this together.

        Args:
            again: Whether the coordinator dropped this node, because it was suspended or cut off.

        Raises:
            NoWeightsError: If the weights should come from a neighbour, and none has given any for `JOIN_S` seconds.
            CoordinatorError: If the coordinator refuses.
        """
        ring, deadline, damaged = self.ring, time.monotonic() + JOIN_S, ""
        if again:
            log.warning("node %d was dropped from the ring and rejoins", ring.node)
        while True:
            facts = self._ask(again, damaged)
            self.set_view(facts)
            has_weights = is_damaged = False
            try:
                has_weights = self._get_weights(facts)
            except CheckpointError as error:
                log.warning("%s; asking for an older one", error)
                is_damaged = True
            if ring.group.any(is_damaged):  # each rank may read files of its own
                damaged = str(facts["resume"])
                continue
            if has_weights:
                break
            if ring.group.any(time.monotonic() > deadline):
                others = ring.view.without(ring.node).nodes
                there = f"although nodes {', '.join(map(str, others))} are in the ring" if others else "and is alone"
                raise NoWeightsError(
                    f"node {ring.node} found no weights to start from for {JOIN_S:g} s: no other node gave its "
                    f"weights, {there}"
                )
            time.sleep(RETRY_S)
            again = True
        self._begin(facts)
        log.info("node %d rank %d: weights %s, from step %d", ring.node, ring.group.rank, facts["source"], self.step)

    def _ask(self, again: bool, damaged: str) -> Facts:
        endpoints = self.ring.endpoints()
        facts: Facts = {}
        if self.client:
            self._before_asking()
            join = self.client.rejoin if again else self.client.join
            facts = join(endpoints, damaged=damaged).facts()
        return self.ring.group.tell(facts)

    def set_view(self, facts: Facts) -> None:
        """Set the nodes that take part from now on."""
        self.ring.set_view(View.from_dict(facts["view"]))

    def _get_weights(self, facts: Facts) -> bool:
        """Get the weights to start from; False if they should come from a neighbour and none gave them."""
        if facts["source"] in ("own", "neighbour"):
            # another process of this node may have made these steps: their seeds must not be used twice
            self.step = max(self.step, int(facts["step"]))
        if facts["source"] == "neighbour":
            return self._take_from_neighbour(facts)
        self._set_weights(facts)
        return True

    def _before_asking(self) -> None:  # noqa: B027 - most members have nothing to do
        """Called before each request to the coordinator, at rank 0."""

    @abstractmethod
    def _take_from_neighbour(self, facts: Facts) -> bool:
        """Take a neighbour's weights; False if none gave them."""

    @abstractmethod
    def _set_weights(self, facts: Facts) -> None:
        """Keep the own weights, or set those of the start or of a checkpoint, as `facts["source"]` says.

        Raises:
            CheckpointError: If the checkpoint is damaged; the coordinator is then asked for an older one.
        """

    @abstractmethod
    def _begin(self, facts: Facts) -> None:
        """Called when the node has its weights: from now on it gets leases and is averaged."""
