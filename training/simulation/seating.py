"""Puts learners on the seats of a cluster: replica, exchange and program of each."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from training.exchange.neighbours import Kind
from training.simulation.clock import Clock
from training.simulation.cluster import Cluster, chance_of
from training.simulation.exchange import Ether, VirtualExchange
from training.simulation.gradients import spelled_out
from training.simulation.network import Network
from training.simulation.pool import Lease
from training.simulation.problem import Job, Problem, Trainable
from training.strategies.base import Seat, StrategyError
from training.strategies.registry import Method
from training.strategies.requests import Program, Ticket
from training.strategy_config import StrategyConfig

State = Literal["away", "running", "computing", "starved", "waiting", "idle", "ended", "dead"]


@dataclass
class Learner:
    """One learner in the simulation."""

    rank: int
    node: int
    seat: Seat
    replica: Trainable
    program: Program
    random: random.Random
    state: State = "away"
    lease: Lease | None = None
    job: Job | None = None
    ticket: Ticket | None = None
    steps: int = 0
    asked: int = 0
    """Gradients that it has asked for, in vain or not."""
    weight: float = 0.0


def check(cluster: Cluster, method: Method, config: StrategyConfig) -> None:
    """See that a method can train on a cluster.

    Raises:
        StrategyError: It cannot; the message says what to change.
    """
    method.check(config)
    if method.traits.shared and cluster.machines > 1 and cluster.per_machine > 1:
        raise StrategyError(f"{method.name} needs all learners on one machine: set per_machine={cluster.learners}")


def make_ether(
    clock: Clock,
    network: Network,
    node_of: Callable[[int], int],
    config: StrategyConfig,
    seed: int,
    news: Callable[[int], None],
) -> Ether:
    """What the nodes' exchanges share; the first learner of a node speaks for it."""
    ranks: dict[int, int] = {}
    for rank in range(network.cluster.learners):
        ranks.setdefault(node_of(rank), rank)
    neighbours: Kind = getattr(config, "neighbours", "ring")
    per_step = int(getattr(config, "per_step", 1))
    return Ether(clock, network, ranks, neighbours, seed, per_step, 0.0, network.cluster.timeout_s, news)


def seat_learners(
    method: Method,
    config: StrategyConfig,
    problem: Problem,
    ether: Ether,
    node_of: Callable[[int], int],
    stale: Callable[[float], None],
) -> list[Learner]:
    """All learners, those that come later included; theirs get no exchange yet."""
    cluster = ether.network.cluster
    late, nodes = {node_of(one.rank) for one in cluster.joins}, len(ether.ranks)
    if len(late) == nodes:
        raise StrategyError("every node has a newcomer, which brings the whole of it: leave one node out of joins")
    learners: list[Learner] = []
    for rank in range(cluster.learners):
        replica, node = problem.replica(), node_of(rank)
        if method.traits.shared and learners:
            replica.share(learners[0].replica)
        ether.num_bytes, exchange = replica.num_bytes, None
        if method.traits.exchange and nodes > 1 and rank == ether.ranks[node] and node not in late:
            exchange = VirtualExchange(ether, node, replica.weights.numel())
        seat = Seat(
            replica=replica,
            rank=rank,
            size=cluster.learners,
            node_rank=rank - ether.ranks[node],
            node_size=min(cluster.per_machine, cluster.learners) if method.traits.grouped else 1,
            nodes=nodes,
            epoch_steps=problem.batches / cluster.learners,
            exchange=exchange,
            stale=stale,
            joined=node in late,
        )
        chance = chance_of(ether.seed, rank)
        program = spelled_out(seat, method.program(seat, config))
        learners.append(Learner(rank, node, seat, replica, program, chance))
    return learners
