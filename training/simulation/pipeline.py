"""Strategy `pipeline` on a virtual clock: one model whose layers are split over the learners."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from training.simulation.clock import Clock
from training.simulation.cluster import Cluster, chance_of
from training.simulation.leases import BatchLease, LeasePool
from training.simulation.network import LinkModel
from training.simulation.problem import Job, Problem
from training.simulation.result import Observer, Outcome, Staleness
from training.strategies.base import StrategyError
from training.strategies.pipeline import PIPELINE, LayerPipelineConfig


class PipelineSimulation:
    """N learners that are the stages of one model (`training.node.pipeline`).

    A step takes the batches of all learners together through all stages, and updates the weights once with the mean
    gradient, like `scpsgd`. Every stage has 1/N of the layers, so its computation for all batches takes as long as the
    step of a learner with the whole model for one batch.

    Args:
        cluster: Machines and links; learners must not die or join.
        problem: Model, data and schedule.
        config: Micro-batches and their schedule; defaults if None.
        seed: Seed of jitter.
        observe: Evaluations of the model per epoch.

    Raises:
        StrategyError: If the model has too few layers, learners die or join, or the configuration is another
            strategy's.
    """

    def __init__(
        self,
        cluster: Cluster,
        problem: Problem,
        config: LayerPipelineConfig | None = None,
        *,
        seed: int = 0,
        observe: int = 1,
    ) -> None:
        self.config = config or LayerPipelineConfig()
        PIPELINE.check(self.config)
        for what, happenings in (("loses one", cluster.losses), ("waits for one", cluster.joins)):
            if happenings:
                raise StrategyError(
                    f"a pipeline that {what} of its stages lacks layers and cannot train: use another strategy if "
                    "learners die or join"
                )
        self.cluster, self.problem = cluster, problem
        self.activations = problem.activations(cluster.learners)
        self.clock, self.pool = Clock(), LeasePool(problem.batches, problem.epochs)
        self.links = LinkModel(cluster, self.clock)
        self.stages = Stages(self.clock, self.links, cluster.learners)
        self.replica = problem.replica()
        self.steps = 0
        self._parts = [problem.replica() for _ in range(cluster.learners)]
        self._observer = Observer(problem, observe)
        self._chances = [chance_of(seed, rank) for rank in range(cluster.learners)]

    def run(self) -> Outcome:
        """Train until all batches are done."""
        while not self.pool.over:
            taken = (self.pool.take() for _ in range(self.cluster.learners))
            leases = [lease for lease in taken if lease is not None]
            self._pass(leases)
            self._update(leases)
            self._observer.look(self.clock.now, self.pool.progress, lambda: [self.replica], lambda mean: mean)
        return self._outcome()

    def _pass(self, leases: Sequence[BatchLease]) -> None:
        """Advance the clock until the batches have passed through all stages."""
        learners, most = self.cluster.learners, self.config.micro_batches
        if self.activations.utterances:
            utterances = len(leases) * self.activations.utterances
            size = -(-utterances // most)
            most = -(-utterances // size)
        # like the engine: 1F1B needs at least as many micro-batches as stages
        kind = self.config.schedule if most >= learners else "gpipe"
        seconds = [
            self.cluster.step_seconds(rank, chance, len(leases) / learners) for rank, chance in enumerate(self._chances)
        ]
        self.stages.run(kind, most, seconds, len(leases) * self.activations.num_bytes)

    def _update(self, leases: Sequence[BatchLease]) -> None:
        """Make one optimizer step with the mean gradient of the batches."""
        at = self.replica.weights
        jobs = [
            Job(part, lease, rank, self.steps, at)
            for rank, (part, lease) in enumerate(zip(self._parts, leases, strict=False))
        ]
        weights = self.problem.gradients(jobs)
        for lease in leases:
            self.pool.finish(lease)
        self.steps += 1
        if not sum(weights):
            return
        with torch.no_grad():
            self.replica.grads.zero_()
            for job, weight in zip(jobs, weights, strict=True):
                self.replica.grads.add_(job.replica.grads, alpha=weight / sum(weights))
        self.replica.set_rate(self.problem.rate(self.pool.progress))
        self.replica.update()

    def _outcome(self) -> Outcome:
        learners, epochs = self.cluster.learners, self.pool.epochs
        weights, spread = self._observer.end(self.clock.now, self.pool.progress, [self.replica])
        return Outcome(
            strategy=PIPELINE.name,
            learners=learners,
            seconds=self.clock.now,
            epoch_s=self.clock.now / epochs,
            open_epoch_s=self.clock.now / epochs,
            steps=[self.steps] * learners,
            staleness=Staleness(),
            bytes_per_step=sum(self.links.sent.values()) / max(1, self.steps * learners),
            bytes_per_nic=max(self.links.carried.values(), default=0.0) / epochs,
            consensus=self._observer.consensus,
            observations=self._observer.seen,
            weights=weights,
            spread=spread,
        )


# --- stages


FORWARD = 1 / 3
"""Share of the forward pass in a step: for each matrix product of the forward pass, the backward pass computes two, for
the inputs and for the weights."""

Kind = Literal["gpipe", "1f1b"]


class Pass(NamedTuple):
    """The forward or backward pass of a micro-batch through a stage."""

    forward: bool
    number: int


def schedule(kind: Kind, stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """The passes of a stage in order, as in torch.distributed.pipelining's ScheduleGPipe and Schedule1F1B.

    GPipe (arXiv:1811.06965) runs all micro-batches forward, then all backward. 1F1B (arXiv:2006.09503) starts with one
    forward pass for every stage from this one on, then alternates backward and forward passes.

    Args:
        kind: The schedule.
        stage: Number of the stage, from 0.
        stages: Number of stages.
        micro_batches: Number of micro-batches; for 1F1B, at least the number of stages.
    """
    forward = [Pass(True, number) for number in range(micro_batches)]
    backward = [Pass(False, number) for number in range(micro_batches)]
    if kind == "gpipe":
        return forward + backward
    first = stages - stage - 1
    turns = [turn for pair in zip(forward[first:], backward, strict=False) for turn in pair]
    return forward[:first] + turns + backward[micro_batches - first :]


class Stages:
    """Times the batches of a pipeline; learner r has stage r.

    A pass starts when the stage has finished its previous one and the input has arrived: hidden frames from the stage
    before, or their gradients from the stage after. Messages overlap with computation, except in 1F1B's alternating
    phase: there a stage waits for its own message, since torch.distributed.pipelining fuses its send with a receive.

    Args:
        clock: Virtual time.
        links: Model of the messages' cost.
        stages: Number of stages.
    """

    def __init__(self, clock: Clock, links: LinkModel, stages: int) -> None:
        self._clock, self._links, self._stages = clock, links, stages
        self._busy = [False] * stages

    def run(self, kind: Kind, micro_batches: int, seconds: Sequence[float], num_bytes: float) -> None:
        """Run one batch, and advance the clock to the end of the last pass.

        Args:
            kind: Schedule.
            micro_batches: Number of equal parts of the batch.
            seconds: Computation time of each stage for the whole batch, forward and backward.
            num_bytes: Size of the batch's hidden frames between two stages; their gradients have the same size.
        """
        self._orders = [schedule(kind, stage, self._stages, micro_batches) for stage in range(self._stages)]
        self._seconds = [whole / micro_batches for whole in seconds]
        self._message = num_bytes / micro_batches
        self._place = [0] * self._stages
        self._here: set[tuple[int, Pass]] = set()
        self._held = [self._clock.now] * self._stages
        # 1F1B fuses sends and receives from the last pass of its warm-up phase to its last forward pass
        turns = [range(self._stages - stage - 1, 2 * micro_batches - self._stages + stage) for stage in self._all]
        self._waits = turns if kind == "1f1b" else [range(0)] * self._stages
        for stage in self._all:
            self._go_on(stage)
        while self._clock.step():
            pass
        assert self._place == [2 * micro_batches] * self._stages

    @property
    def _all(self) -> range:
        return range(self._stages)

    def _go_on(self, stage: int) -> None:
        """Start the next pass of a stage if its input is there."""
        place, order = self._place[stage], self._orders[stage]
        if self._busy[stage] or place == len(order):
            return
        turn = order[place]
        last = stage == self._stages - 1
        # forward passes of the first stage and backward passes of the last one need no message
        if (stage, turn) in self._here or (stage == 0 and turn.forward) or (last and not turn.forward):
            self._busy[stage] = True
            seconds = self._seconds[stage] * (FORWARD if turn.forward else 1 - FORWARD)
            self._clock.at(max(self._clock.now, self._held[stage]) + seconds, _later(self._done, stage, turn))

    def _done(self, stage: int, turn: Pass) -> None:
        self._busy[stage] = False
        target = stage + 1 if turn.forward else stage - 1
        if 0 <= target < self._stages:
            arrival = self._links.send(stage, target, self._message)
            self._clock.at(arrival, _later(self._arrive, target, turn))
            if self._place[stage] in self._waits[stage]:
                self._held[stage] = arrival
        self._place[stage] += 1
        self._go_on(stage)

    def _arrive(self, stage: int, turn: Pass) -> None:
        self._here.add((stage, turn))
        self._go_on(stage)


def _later(function: Callable[[int, Pass], None], stage: int, turn: Pass) -> Callable[[], None]:
    return lambda: function(stage, turn)
