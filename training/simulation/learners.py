"""Creates the learners of a simulated cluster: replica, exchange and program of each; and lets newcomers join."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from training.exchange.neighbours import Kind
from training.simulation.clock import Clock
from training.simulation.cluster import Cluster, chance_of
from training.simulation.exchange import VirtualExchange, VirtualNetwork
from training.simulation.gradients import VirtualProgram, spelled_out
from training.simulation.leases import BatchLease
from training.simulation.network import LinkModel
from training.simulation.problem import Job, Problem, Trainable
from training.strategies.base import LearnerContext, StrategyError
from training.strategies.requests import Ticket, Wait
from training.strategies.strategy import JoinPoint, Method, StrategyConfig

if TYPE_CHECKING:
    from training.simulation.simulator import Simulation

State = Literal["away", "running", "computing", "starved", "waiting", "idle", "ended", "dead"]


@dataclass
class SimulatedLearner:
    """One learner in the simulation."""

    rank: int
    node: int
    context: LearnerContext
    replica: Trainable
    program: VirtualProgram
    random: random.Random
    state: State = "away"
    lease: BatchLease | None = None
    job: Job | None = None
    ticket: Ticket | None = None
    steps: int = 0
    asked: int = 0
    """Gradients that it has requested, including those that found no work left."""
    weight: float = 0.0


def check(cluster: Cluster, method: Method, config: StrategyConfig) -> None:
    """Check that a method can train on a cluster.

    Raises:
        StrategyError: If it cannot; the message says what to change.
    """
    method.check(config)
    if method.traits.shared and cluster.machines > 1 and cluster.per_machine > 1:
        raise StrategyError(f"{method.name} needs all learners on one machine: set per_machine={cluster.learners}")


def make_network(
    clock: Clock,
    links: LinkModel,
    node_of: Callable[[int], int],
    config: StrategyConfig,
    seed: int,
    news: Callable[[int], None],
) -> VirtualNetwork:
    """Build the network that the nodes' exchanges share; the first learner of a node exchanges for it."""
    ranks: dict[int, int] = {}
    for rank in range(links.cluster.learners):
        ranks.setdefault(node_of(rank), rank)
    neighbours: Kind = getattr(config, "neighbours", "ring")
    per_step = int(getattr(config, "per_step", 1))
    return VirtualNetwork(clock, links, ranks, neighbours, seed, per_step, 0.0, links.cluster.timeout_s, news)


def make_learners(
    method: Method,
    config: StrategyConfig,
    problem: Problem,
    network: VirtualNetwork,
    node_of: Callable[[int], int],
    stale: Callable[[float], None],
) -> list[SimulatedLearner]:
    """Create all learners, including newcomers, which get no exchange yet."""
    cluster = network.links.cluster
    late, nodes = {node_of(join.rank) for join in cluster.joins}, len(network.ranks)
    if len(late) == nodes:
        raise StrategyError("every node has a newcomer, which brings its whole node: leave one node out of joins")
    learners: list[SimulatedLearner] = []
    for rank in range(cluster.learners):
        replica, node = problem.replica(), node_of(rank)
        if method.traits.shared and learners:
            replica.share(learners[0].replica)
        network.num_bytes, exchange = replica.num_bytes, None
        if method.traits.exchange and nodes > 1 and rank == network.ranks[node] and node not in late:
            exchange = VirtualExchange(network, node, replica.weights.numel())
        context = LearnerContext(
            replica=replica,
            rank=rank,
            size=cluster.learners,
            node_rank=rank - network.ranks[node],
            node_size=min(cluster.per_machine, cluster.learners) if method.traits.grouped else 1,
            nodes=nodes,
            epoch_steps=problem.batches / cluster.learners,
            exchange=exchange,
            stale=stale,
            joined=node in late,
        )
        chance = chance_of(network.seed, rank)
        program = spelled_out(context, method.program(context, config))
        learners.append(SimulatedLearner(rank, node, context, replica, program, chance))
    return learners


# --- newcomers


class Arrivals:
    """Newcomers of a simulation. They copy the nearest learner's state at the moment that `Method.join_point` defines.

    With h-adpsgd, a newcomer brings its whole node.

    Args:
        simulation: The simulation that they join.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._here: list[list[SimulatedLearner]] = []

    def come(self, rank: int) -> None:
        """Let a learner, and with it its node, request the weights, which then travel to it."""
        simulation = self._simulation
        newcomers = [
            learner
            for learner in simulation.learners
            if learner.node == simulation.learners[rank].node and learner.state == "away"
        ]
        giver = self._giver(rank)
        if not newcomers or giver is None or simulation.pool.over:
            return
        first, size = newcomers[0].rank, giver.replica.num_bytes
        arrival = simulation.links.send(giver.rank, first, size)
        for other in newcomers[1:]:
            arrival = max(arrival, simulation.links.send(first, other.rank, size))
        simulation.clock.at(arrival, lambda: self._arrive(newcomers))

    def _arrive(self, newcomers: list[SimulatedLearner]) -> None:
        self._here.append(newcomers)
        self.admit("immediately")
        self.admit("during compute")

    def _giver(self, rank: int) -> SimulatedLearner | None:
        there = [learner for learner in self._simulation.learners if learner.state not in ("dead", "away", "ended")]
        return min(there, key=lambda learner: (abs(learner.rank - rank), learner.rank), default=None)

    def admit(self, moment: JoinPoint) -> None:
        """Admit the newcomers that wait for this moment."""
        if not self._here or self._simulation.method.join_point != moment:
            return
        here, self._here = self._here, []
        for newcomers in here:
            giver = self._giver(newcomers[0].rank)
            if giver is None or self._simulation.pool.over:
                continue
            if moment == "during compute" and giver.state != "computing":
                self._here.append(newcomers)  # the giver still waits for its round's mean
                continue
            for newcomer in newcomers:
                self._equip(newcomer, giver)
            self._simulation.enter(newcomers, giver)

    def _equip(self, learner: SimulatedLearner, giver: SimulatedLearner) -> None:
        """Copy the giver's weights, its optimizer's state (unless configured otherwise) and its program's state."""
        simulation = self._simulation
        if getattr(simulation.config, "newcomer", "weights+optimizer") == "weights":
            learner.replica.weights.copy_(giver.replica.weights)
        elif not simulation.method.traits.shared:
            learner.replica.copy_from(giver.replica)
        if not simulation.method.free:
            _settle(giver)
            learner.context.state = {name: tensor.clone() for name, tensor in giver.context.state.items()}
        learner.asked = giver.asked - 1
        if simulation.method.traits.exchange and learner.rank == simulation.network.ranks[learner.node]:
            learner.context.exchange = VirtualExchange(
                simulation.network, learner.node, learner.replica.weights.numel()
            )


def _settle(giver: SimulatedLearner) -> None:
    """Let a learner store its pending communication in its state; the outcome has already arrived."""
    settling = giver.context.settle()
    outcome: Any = None
    while True:
        try:
            request = settling.send(outcome)
        except StopIteration:
            return
        assert isinstance(request, Wait)
        assert request.ticket.done
        outcome = request.ticket.outcome
