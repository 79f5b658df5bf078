"""Evaluates the average model while learners train."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from training.simulation.problem import Problem, Trainable
from training.simulation.result import Observation


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
        distances = [one.consensus for one in self.seen[:-1]] or [0.0]
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
    for one in replicas:
        mean += one.weights
    mean /= len(replicas)
    squares = [float((one.weights - mean).square().mean()) for one in replicas]
    return mean.float(), (sum(squares) / len(squares)) ** 0.5
