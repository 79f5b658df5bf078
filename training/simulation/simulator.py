"""Simulates any strategy on a virtual clock: deterministic, in one process, without threads."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from training.coordinator.membership import Member, View
from training.simulation.clock import Clock
from training.simulation.cluster import Cluster
from training.simulation.collectives import Participants, VirtualCollectives
from training.simulation.gradients import Gather, Idle
from training.simulation.learners import Arrivals, SimulatedLearner, check, make_learners, make_network
from training.simulation.leases import LeasePool
from training.simulation.network import LinkModel
from training.simulation.parameter_server import VirtualParameterServer
from training.simulation.pipeline import PipelineSimulation
from training.simulation.problem import Job, Problem, Trainable
from training.simulation.result import Observer, Outcome, Staleness
from training.strategies.base import StrategyError
from training.strategies.pipeline import LayerPipelineConfig
from training.strategies.registry import find_method, find_strategy
from training.strategies.requests import AllReduce, Compute, Mix, Start, Ticket, Wait, Work
from training.strategies.strategy import StrategyConfig


class SimulationError(RuntimeError):
    """The learners wait for each other forever."""


class Simulation:
    """Simulates N learners that run a method's programs.

    Args:
        cluster: Machines, links, and learners that die or join.
        strategy: Name of the method.
        problem: Model, data and schedule.
        config: The method's configuration; its defaults if None.
        seed: Seed of jitter and random neighbours.
        observe: Evaluations of the average model per epoch.

    Raises:
        StrategyError: If the method does not support the cluster.
    """

    def __init__(
        self,
        cluster: Cluster,
        strategy: str,
        problem: Problem,
        config: StrategyConfig | None = None,
        *,
        seed: int = 0,
        observe: int = 1,
    ) -> None:
        self.cluster, self.problem, self.method = cluster, problem, find_method(strategy)
        self.config = config or self.method.config()
        check(cluster, self.method, self.config)
        self.clock, self.pool = Clock(), LeasePool(problem.batches, problem.epochs)
        self.links = LinkModel(cluster, self.clock)
        self.staleness = Staleness()
        self._observer = Observer(problem, observe)
        self._nodes = cluster.machines if self.method.traits.grouped else cluster.learners
        self._over_at = self._taken_at = self._all_at = 0.0
        self._taken = 0
        self._views = self._active = 0
        self._rounds = [0]
        self._starved: list[SimulatedLearner] = []
        self.present = Participants(self._node_of)
        self._arrivals = Arrivals(self)
        self.collectives = VirtualCollectives(
            self.clock, self.links, self.present, self._node_of, self._finish, self._arrivals.admit
        )
        self.network = make_network(self.clock, self.links, self._node_of, self.config, seed, self._news)
        self._server: VirtualParameterServer | None = None
        if self.method.traits.server:
            servers = int(getattr(self.config, "servers", 1))
            self._server = VirtualParameterServer(
                problem.replica(), servers, self.clock, self.links, self._rate, self._finish
            )
        self.learners = make_learners(
            self.method, self.config, problem, self.network, self._node_of, self.staleness.add
        )

    def _node_of(self, rank: int) -> int:
        return self.cluster.machine(rank) if self.method.traits.grouped else rank

    # --- running

    def run(self) -> Outcome:
        """Run until every program has ended.

        Raises:
            SimulationError: If programs wait for each other forever.
            StrategyError: If all learners died.
        """
        late = {learner.rank for learner in self.learners if learner.context.joined}
        staggered = self.method.free and self._nodes > 1
        self._set_views([learner for learner in self.learners if learner.rank not in late])
        for learner in self.learners:
            if learner.rank not in late:
                # staggered starts: in lockstep, all exchanges would overlap with each other
                delay = learner.random.random() * self.cluster.step_s if staggered else 0.0
                self.clock.at(delay, _later(self._resume, learner, None))
                self.present.add(learner.rank)
                self._active += 1
                learner.state = "running"
        for join in self.cluster.losses:
            self.clock.at(join.at_s, _later(self._lose, join.rank))
        for join in self.cluster.joins:
            self.clock.at(join.at_s, _later(self._arrivals.come, join.rank))
        while self._active:
            if not self.clock.step():
                raise SimulationError(self._stuck())
        return self._outcome()

    def _stuck(self) -> str:
        left = [learner for learner in self.learners if learner.state not in ("ended", "dead")]
        held = [f"learner {learner.rank} is {learner.state}" for learner in left]
        return f"{self.method.name} is deadlocked at {self.clock.now:.3f} s: {', '.join(held[:8])}"

    def _resume(self, learner: SimulatedLearner, value: Any) -> None:
        """Run a program until it has to wait."""
        if learner.state in ("dead", "ended"):
            return
        learner.state = "running"
        while True:
            try:
                request = learner.program.send(value)
            except StopIteration:
                self._end(learner)
                return
            if isinstance(request, Start):
                value = self._start(learner, request)
            elif isinstance(request, Wait):
                if not request.ticket.done:
                    learner.state, learner.ticket = "waiting", request.ticket
                    return
                value = request.ticket.outcome
            elif isinstance(request, Compute):
                learner.asked += 1
                if learner.asked == len(self._rounds):
                    self._rounds.append(self._rounds[-1] + len(self.present.everybody))
                if not self.pool.over:
                    self._compute(learner)
                    return
                learner.replica.set_rate(self._rate_of(learner))
                value = None
            else:
                assert isinstance(request, Idle)
                learner.state = "idle"
                return

    def _end(self, learner: SimulatedLearner) -> None:
        learner.state = "ended"
        self._active -= 1
        self.present.remove(learner.rank)
        self.collectives.leave(learner.rank)

    def _start(self, learner: SimulatedLearner, request: Start) -> Ticket:
        ticket = Ticket(request.op)
        if isinstance(request.op, AllReduce | Gather | Mix):
            self.collectives.join(learner.rank, ticket)
        else:
            if self._server is None:
                raise StrategyError(f"{self.method.name} uses a parameter server, but is registered without one")
            self._server.ask(learner.rank, ticket)
        return ticket

    def _finish(self, rank: int, ticket: Ticket, outcome: Any) -> None:
        """Finish a learner's communication, and resume its program if it waits for that."""
        ticket.done, ticket.outcome = True, outcome
        learner = self.learners[rank]
        if learner.state == "waiting" and learner.ticket is ticket:
            learner.ticket = None
            self._resume(learner, outcome)
        elif learner.state == "idle":
            self._resume(learner, None)

    def _news(self, node: int) -> None:
        """Resume a node's learner if it waits for its exchange, which has news."""
        learner = self.learners[self.network.ranks[node]]
        if learner.state == "idle":
            learner.state = "running"
            self.clock.after(0.0, _later(self._resume, learner, None))

    # --- computing

    def _compute(self, learner: SimulatedLearner) -> None:
        lease = self.pool.take()
        if lease is None:  # others still train: if one of them dies, its batch returns to the pool
            learner.state = "starved"
            self._starved.append(learner)
            return
        weights = learner.replica.weights.clone() if self.method.traits.shared else None
        self._taken_at = self.clock.now
        self._taken += 1
        if self._taken == self.cluster.learners:
            self._all_at = self.clock.now
        learner.lease = lease
        learner.job = Job(learner.replica, lease, learner.rank, learner.steps, weights)
        learner.state = "computing"
        self.clock.after(self.cluster.step_seconds(learner.rank, learner.random), _later(self._computed, learner))
        self._arrivals.admit("during compute")

    def _computed(self, learner: SimulatedLearner) -> None:
        if learner.state != "computing":
            return
        assert learner.lease is not None
        if learner.job is not None:
            self._work_off()
        learner.replica.set_rate(self._rate_of(learner))
        self.pool.finish(learner.lease)
        learner.lease = None
        learner.steps += 1
        self._observer.look(self.clock.now, self.pool.progress, self._replicas, learner.context.finish)
        weight = learner.weight
        if self.pool.over:
            self._over_at = self.clock.now
            starved, self._starved = self._starved, []
            for other in starved:
                other.replica.set_rate(self._rate_of(other))
                self._resume(other, None)
        self._resume(learner, Work(weight))

    def _work_off(self) -> None:
        """Compute all pending gradients at once: nothing that they depend on changes any more."""
        waiting = [learner for learner in self.learners if learner.job is not None]
        weights = self.problem.gradients([learner.job for learner in waiting if learner.job is not None])
        for learner, weight in zip(waiting, weights, strict=True):
            learner.weight, learner.job = weight, None

    def _rate(self) -> float:
        return self.problem.rate(self.pool.progress)

    def _rate_of(self, learner: SimulatedLearner) -> float:
        """Learning rate of a learner; if all wait for each other, it follows from the round, so replicas stay equal.

        A round has one batch for each learner that was there when the first learner started it.
        """
        if self.method.free:
            return self._rate()
        return self.problem.rate(min(self._rounds[learner.asked], self.pool.total) / self.pool.batches)

    def _replicas(self) -> list[Trainable]:
        return [learner.replica for learner in self.learners if learner.state not in ("dead", "away")]

    # --- coming and going

    def _lose(self, rank: int) -> None:
        lost = [learner for learner in self.learners if learner.node == self.learners[rank].node]
        for learner in lost:
            if learner.state in ("ended", "dead", "away"):
                continue
            learner.state = "dead"
            self._active -= 1
            learner.program.close()
            if learner.context.exchange is not None:
                learner.context.exchange.close()
            if learner.lease is not None:
                self.pool.give_back(learner.lease)
                learner.lease, learner.job = None, None
        self.clock.after(self.cluster.timeout_s, _later(self._forget, lost))

    def _forget(self, lost: Sequence[SimulatedLearner]) -> None:
        """Remove dead learners, once the others have noticed."""
        for learner in lost:
            if learner.state == "dead":
                self.present.remove(learner.rank)
        alive = [learner for learner in self.learners if learner.state not in ("dead", "away")]
        if not alive:
            raise StrategyError("all learners died before the work was done: list fewer losses")
        self._set_views(alive)
        for learner in lost:
            self.collectives.leave(learner.rank)
        starved, self._starved = [learner for learner in self._starved if learner.state == "starved"], []
        for learner in starved:
            if not self.pool.over:
                self._compute(learner)

    def enter(self, newcomers: Sequence[SimulatedLearner], giver: SimulatedLearner) -> None:
        """Start newcomers, which have copied the giver's state."""
        for newcomer in newcomers:
            newcomer.state = "running"
            self._active += 1
            self.present.add(newcomer.rank)
        self._set_views([learner for learner in self.learners if learner.state not in ("dead", "away")])
        for newcomer in newcomers:
            self.collectives.enter_ring(newcomer.rank, giver.rank, newcomer.replica.weights)
            self._resume(newcomer, None)

    def _set_views(self, members: list[SimulatedLearner]) -> None:
        self._views += 1
        nodes = sorted({member.node for member in members})
        view = View(self._views, tuple(Member(node, "virtual", (f"virtual://{node}",)) for node in nodes))
        for exchange in list(self.network.open.values()):
            exchange.set_view(view)

    # --- the end

    def _outcome(self) -> Outcome:
        done = [learner for learner in self.learners if learner.state == "ended"]
        if not self.pool.over:
            raise StrategyError("all learners died before the work was done: list fewer losses")
        for learner in self.learners:
            if learner.context.exchange is not None:
                learner.context.exchange.close()
        weights, spread = self._observer.end(self.clock.now, self.pool.progress, [learner.replica for learner in done])
        steps = [learner.steps for learner in self.learners]
        return Outcome(
            strategy=self.method.name,
            learners=self.cluster.learners,
            seconds=self._over_at,
            epoch_s=self._over_at / self.pool.epochs,
            open_epoch_s=self.pool.batches * (self._taken_at - self._all_at) / max(1, self._taken - len(self.learners)),
            steps=steps,
            staleness=self.staleness,
            bytes_per_step=sum(self.links.sent.values()) / max(1, sum(steps)),
            bytes_per_nic=max(self.links.carried.values(), default=0.0) / self.pool.epochs,
            consensus=self._observer.consensus,
            observations=self._observer.seen,
            weights=weights,
            spread=spread,
            repeated=self.pool.repeated,
        )


def _later(function: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: function(*args)


# --- any strategy


def simulate(
    cluster: Cluster,
    strategy: str,
    problem: Problem,
    config: StrategyConfig | None = None,
    *,
    seed: int = 0,
    observe: int = 1,
) -> Outcome:
    """Train on a virtual clock until all work is done.

    Args:
        cluster: Machines, links, and learners that die or join.
        strategy: Name of the strategy.
        problem: Model, data and schedule.
        config: The strategy's configuration; its defaults if None.
        seed: Seed of jitter and random neighbours.
        observe: Evaluations of the average model per epoch.

    Raises:
        SimulationError: If learners wait for each other forever.
        StrategyError: If the strategy is unknown or does not support the cluster, or all learners have died.
    """
    if find_strategy(strategy).traits.split:
        layers = cast(LayerPipelineConfig | None, config)
        return PipelineSimulation(cluster, problem, layers, seed=seed, observe=observe).run()
    return Simulation(cluster, strategy, problem, config, seed=seed, observe=observe).run()
