"""What a simulation trains: the interface, and a problem without a model, for simulations of timing only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from training.simulation.leases import BatchLease
from training.strategies.base import Replica


class Trainable(Replica, Protocol):
    """A replica that a simulation controls."""

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next updates."""

    def copy_from(self, other: Self) -> None:
        """Copy another replica's weights and optimizer state."""

    def share(self, other: Self) -> None:
        """Become a view of another replica's weights, with an optimizer of its own."""


@dataclass
class Job:
    """A gradient to compute.

    Attributes:
        replica: Receives the gradient.
        lease: The batch.
        rank: The learner, for its random numbers.
        step: Number of the learner's step.
        weights: Copy of the weights to compute the gradient at, if the replica's may change; None uses the replica's.
    """

    replica: Trainable
    lease: BatchLease
    rank: int
    step: int
    weights: Tensor | None = None


@dataclass(frozen=True)
class Activations:
    """Data that one stage of a split model sends to the next.

    Attributes:
        num_bytes: Size of the hidden frames of one learner's batch; their gradients have the same size.
        utterances: Utterances of one learner's batch, which limit the number of micro-batches; 0 if unknown.
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
        """A new replica with the initial weights, which are the same for all replicas."""

    def gradients(self, jobs: Sequence[Job]) -> list[float]:
        """Compute gradients of mean losses into the replicas; returns the batches' weights (tokens, utterances)."""

    def rate(self, progress: float) -> float:
        """Learning rate at a number of epochs."""

    def evaluate(self, weights: Tensor) -> Mapping[str, float]:
        """Evaluate a model with these weights: `loss`, perhaps `wer`; empty without a model."""

    def activations(self, stages: int) -> Activations:
        """Data that travels between the model's stages, for `pipeline`.

        Raises:
            StrategyError: If the model cannot be split into that many stages.
        """


class Blank:
    """A replica with a single weight that stands for a model of any size."""

    def __init__(self, num_bytes: float) -> None:
        self.weights, self.grads = torch.zeros(1), torch.zeros(1)
        self._count, self.num_bytes = [0], num_bytes

    @property
    def updates(self) -> int:
        """Updates of these weights, by all replicas that share them."""
        return self._count[0]

    def update(self) -> None:
        """Count the update; the weight does not change."""
        self._count[0] += 1

    def drop_momentum(self) -> None:
        """Do nothing: there is no optimizer."""

    def set_rate(self, lr: float) -> None:
        """Do nothing: there is no optimizer."""

    def copy_from(self, other: Self) -> None:
        """Do nothing: all replicas are equal."""

    def share(self, other: Self) -> None:
        """Share another replica's update count."""
        self._count = other._count


@dataclass
class Timing:
    """A problem without a model, to simulate time and traffic only.

    Attributes:
        batches: Batches of an epoch.
        epochs: Passes over the data.
        num_bytes: The model's size in fp32.
        border_bytes: Size of the hidden frames of a learner's batch between two stages of a pipeline.
    """

    batches: int
    epochs: int = 1
    num_bytes: float = 0.0
    border_bytes: float = 0.0

    def replica(self) -> Blank:
        """A replica that stands for a model of `num_bytes` bytes."""
        return Blank(self.num_bytes)

    def gradients(self, jobs: Sequence[Job]) -> list[float]:
        """Compute nothing; every batch has weight 1."""
        return [1.0] * len(jobs)

    def rate(self, progress: float) -> float:
        """Learning rate, which is unused: 0."""
        return 0.0

    def evaluate(self, weights: Tensor) -> Mapping[str, float]:
        """Nothing: there is no model to evaluate."""
        return {}

    def activations(self, stages: int) -> Activations:
        """The configured size at every border; without layers, any number of stages is possible."""
        return Activations(self.border_bytes)
