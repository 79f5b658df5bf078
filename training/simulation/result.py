"""Results of a simulation, and the evaluations of the average model on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from training.simulation.problem import Problem, Trainable


@dataclass(frozen=True)
class Observation:
    """An evaluation of the average model during training.

    Attributes:
        at_s: Virtual seconds.
        epochs: Epochs trained so far, fractions included.
        consensus: Consensus distance: RMS distance of a learner's weight from the mean; 0 if all learners are equal.
        figures: Results of the average model.
    """

    at_s: float
    epochs: float
    consensus: float
    figures: dict[str, float]


@dataclass
class Staleness:
    """A running mean and maximum, in steps."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, steps: float) -> None:
        """Add the staleness of an applied gradient or average."""
        self.count += 1
        self.total += steps
        self.most = max(self.most, steps)

    @property
    def mean(self) -> float:
        """The mean; 0 without any value."""
        return self.total / self.count if self.count else 0.0


@dataclass
class Outcome:
    """A finished simulation.

    Attributes:
        strategy: Name of the method.
        learners: Number of learners.
        seconds: Virtual seconds until the last batch was finished.
        epoch_s: Virtual seconds per epoch.
        open_epoch_s: Seconds of an epoch in a long training, where the next epoch starts before the last batch of this
            one is finished; computed from the times at which batches were leased.
        steps: Steps of each learner.
        staleness: Staleness of gradients and averages, in steps.
        bytes_per_step: Mean bytes that a learner sends per step.
        bytes_per_nic: Bytes that the busiest machine sends over the network in an epoch.
        consensus: Mean consensus distance of the observations before the learners are averaged at the end.
        observations: Observations during training; the last one is of the finished model.
        weights: Mean weights of the learners that reached the end.
        spread: Consensus distance of the learners at the very end.
        repeated: Batches that had to be trained again because a learner died.
    """

    strategy: str
    learners: int
    seconds: float
    epoch_s: float
    open_epoch_s: float
    steps: list[int]
    staleness: Staleness
    bytes_per_step: float
    bytes_per_nic: float
    consensus: float
    observations: list[Observation] = field(default_factory=list)
    weights: Tensor | None = None
    spread: float = 0.0
    repeated: int = 0

    @property
    def figures(self) -> dict[str, float]:
        """Results of the finished model."""
        return self.observations[-1].figures if self.observations else {}

    def curve(self) -> list[dict[str, float]]:
        """The observations: virtual seconds, epochs trained, consensus distance, and results of the average model."""
        return [
            {
                "at_s": observation.at_s,
                "epochs": observation.epochs,
                "consensus": observation.consensus,
                **observation.figures,
            }
            for observation in self.observations
        ]

    def row(self, condition: str, one_epoch_s: float | None = None) -> dict[str, Any]:
        """Convert to a row of a table.

        Args:
            condition: Describes the cluster, such as a slow learner.
            one_epoch_s: Seconds of an epoch with a single learner, for the speed-up.
        """
        return {
            "strategy": self.strategy,
            "learners": self.learners,
            "condition": condition,
            "epoch_s": self.epoch_s,
            "speedup": one_epoch_s / self.epoch_s if one_epoch_s else None,
            "loss": self.figures.get("loss"),
            "wer": self.figures.get("wer"),
            "staleness": self.staleness.mean,
            "consensus": self.consensus,
            "bytes": self.bytes_per_step,
        }


# --- evaluations on the way


class Observer:
    """Evaluates the mean of the replicas several times per epoch; takes no virtual time.

    Args:
        problem: Evaluates weights.
        per_epoch: Evaluations per epoch; 0 evaluates at the end only.
    """

    def __init__(self, problem: Problem, per_epoch: int) -> None:
        self._problem, self._per_epoch, self._next = problem, per_epoch, 1
        self.seen: list[Observation] = []

    @property
    def consensus(self) -> float:
        """Mean consensus distance over the observations before the end."""
        distances = [observation.consensus for observation in self.seen[:-1]] or [0.0]
        return sum(distances) / len(distances)

    def look(
        self,
        now: float,
        epochs: float,
        replicas: Callable[[], Sequence[Trainable]],
        finish: Callable[[Tensor], Tensor],
    ) -> None:
        """Evaluate, if an observation is due.

        Args:
            now: Virtual seconds.
            epochs: Epochs trained so far.
            replicas: Returns the replicas of all live learners.
            finish: Turns their mean into the model (`LearnerContext.finish`).
        """
        if not self._per_epoch or epochs * self._per_epoch < self._next - 1e-9:
            return
        self._next += 1
        mean, distance = mean_and_distance(replicas())
        self.seen.append(Observation(now, epochs, distance, dict(self._problem.evaluate(finish(mean)))))

    def end(self, now: float, epochs: float, replicas: Sequence[Trainable]) -> tuple[Tensor, float]:
        """Evaluate the finished model; returns its weights and the consensus distance."""
        mean, distance = mean_and_distance(replicas)
        self.seen.append(Observation(now, epochs, distance, dict(self._problem.evaluate(mean))))
        return mean, distance


@torch.no_grad()
def mean_and_distance(replicas: Sequence[Trainable]) -> tuple[Tensor, float]:
    """Mean of the replicas' weights, and their consensus distance (root mean square over weights and replicas)."""
    mean = torch.zeros_like(replicas[0].weights, dtype=torch.float64)
    for replica in replicas:
        mean += replica.weights
    mean /= len(replicas)
    squares = [float((replica.weights - mean).square().mean()) for replica in replicas]
    return mean.float(), (sum(squares) / len(squares)) ** 0.5
