"""Strategy `pipeline` on a virtual clock: one model whose layers are split over the learners."""

from collections.abc import Sequence

import torch

from training.simulation.clock import Clock
from training.simulation.cluster import Cluster, chance_of
from training.simulation.leases import BatchLease, LeasePool
from training.simulation.network import LinkModel
from training.simulation.observer import Observer
from training.simulation.pipeline_stages import Stages
from training.simulation.problem import Job, Problem
from training.simulation.result import Outcome, Staleness
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
