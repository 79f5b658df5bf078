"""Looks at the average model while learners train."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from training.simulation.problem import Problem, Trainable
from training.simulation.result import Observation


class Observer:
    """Evaluates the mean of the replicas some times an epoch; costs no virtual time.

    Args:
        problem: Evaluates.
        per_epoch: Looks per epoch; 0 looks at the end only.
    """

    def __init__(self, problem: Problem, per_epoch: int) -> None:
        self._problem, self._per_epoch, self._next = problem, per_epoch, 1
        self.seen: list[Observation] = []

    @property
    def consensus(self) -> float:
        """Mean distance of the looks in mid-run."""
        distances = [one.consensus for one in self.seen[:-1]] or [0.0]
        return sum(distances) / len(distances)

    def look(
        self,
        now: float,
        epochs: float,
        replicas: Callable[[], Sequence[Trainable]],
        finish: Callable[[Tensor], Tensor],
    ) -> None:
        """Look, if it is time to.

        Args:
            now: Virtual seconds.
            epochs: Trained so far.
            replicas: Of all learners that are there.
            finish: The model that their mean stands for (`Seat.finish`).
        """
        if not self._per_epoch or epochs * self._per_epoch < self._next - 1e-9:
            return
        self._next += 1
        mean, distance = mean_and_distance(replicas())
        self.seen.append(Observation(now, epochs, distance, dict(self._problem.evaluate(finish(mean)))))

    def end(self, now: float, epochs: float, replicas: Sequence[Trainable]) -> tuple[Tensor, float]:
        """Look at the finished model; its weights, and the distance between the replicas."""
        mean, distance = mean_and_distance(replicas)
        self.seen.append(Observation(now, epochs, distance, dict(self._problem.evaluate(mean))))
        return mean, distance


@torch.no_grad()
def mean_and_distance(replicas: Sequence[Trainable]) -> tuple[Tensor, float]:
    """Mean of the replicas' weights, and the RMS distance from it, by weight."""
    mean = torch.zeros_like(replicas[0].weights, dtype=torch.float64)
    for one in replicas:
        mean += one.weights
    mean /= len(replicas)
    squares = [float((one.weights - mean).square().mean()) for one in replicas]
    return mean.float(), (sum(squares) / len(squares)) ** 0.5
