"""What is trained: an interface, and the empty model of simulations that are about time only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from training.simulation.leases import BatchLease
from training.strategies.base import Replica


class Trainable(Replica, Protocol):
    """A replica that a simulation can steer."""

    def set_rate(self, lr: float) -> None:
        """The learning rate of the next updates."""

    def copy_from(self, other: Any) -> None:
        """Take over another replica's weights and optimizer state."""

    def share(self, other: Any) -> None:
        """Become a view of another replica's weights, with an optimizer of its own."""


@dataclass
class Job:
    """A gradient that is wanted.

    Attributes:
        replica: Gets the gradient.
        lease: The batch.
        rank: The learner, for its random numbers.
        step: The learner's.
        weights: A copy of the weights to compute at, if they may have changed since; None means the replica's.
    """

    replica: Trainable
    lease: BatchLease
    rank: int
    step: int
    weights: Tensor | None = None


@dataclass(frozen=True)
class Activations:
    """What goes from one stage of a split model to the next.

    Attributes:
        num_bytes: Of the hidden frames of one learner's batch; their gradients are as many.
        utterances: Of one learner's batch: it cannot be cut into more micro-batches; 0 if nobody knows.
    """

    num_bytes: float
    utterances: int = 0


class Problem(Protocol):
    """A model, its data and its schedule.

    Attributes:
        batches: Batches of an epoch, each one learner's step.
        epochs: Passes over the data.
    """

    batches: int
    epochs: int

    def replica(self) -> Trainable:
        """A new replica with the initial weights; all are equal."""

    def gradients(self, jobs: Sequence[Job]) -> list[float]:
        """Compute gradients of mean losses into the replicas; the batches' weights (tokens, utterances)."""

    def rate(self, progress: float) -> float:
        """The learning rate after so many epochs."""

    def evaluate(self, weights: Tensor) -> Mapping[str, float]:
        """Figures of a model with these weights: `loss`, perhaps `wer`; nothing if there is no model."""

    def activations(self, stages: int) -> Activations:
        """What travels between the model's stages, for `pipeline`.

        Raises:
            StrategyError: The model cannot be split into so many.
        """


class Blank:
    """A replica of one number, which stands for a model of any size."""

    def __init__(self, num_bytes: float) -> None:
        self.weights, self.grads = torch.zeros(1), torch.zeros(1)
        self._count, self.num_bytes = [0], num_bytes

    @property
    def updates(self) -> int:
        """See `Replica`."""
        return self._count[0]

    def update(self) -> None:
        """Nothing changes."""
        self._count[0] += 1

    def drop_momentum(self) -> None:
        """There is none."""

    def set_rate(self, lr: float) -> None:
        """There is nothing to learn."""

    def copy_from(self, other: Trainable) -> None:
        """All are alike."""

    def share(self, other: Any) -> None:
        """See `Trainable`."""
        self._count = other._count


@dataclass
class Timing:
    """Work without a model: what remains is time and bytes.

    Attributes:
        batches: Batches of an epoch.
        epochs: Passes.
        num_bytes: The model's size in fp32.
        border_bytes: Hidden frames of a learner's batch between two stages of a pipeline.
    """

    batches: int
    epochs: int = 1
    num_bytes: float = 0.0
    border_bytes: float = 0.0

    def replica(self) -> Blank:
        """See `Problem.replica`."""
        return Blank(self.num_bytes)

    def gradients(self, jobs: Sequence[Job]) -> list[float]:
        """See `Problem.gradients`."""
        return [1.0] * len(jobs)

    def rate(self, progress: float) -> float:
        """See `Problem.rate`."""
        return 0.0

    def evaluate(self, weights: Tensor) -> Mapping[str, float]:
        """See `Problem.evaluate`."""
        return {}

    def activations(self, stages: int) -> Activations:
        """See `Problem.activations`; what has no layers can be split in any way."""
        return Activations(self.border_bytes)
