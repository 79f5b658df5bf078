"""What a rank does between a gradient and the next: reach the other learners, and change the weights."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.learner.checkpoint import ReplicaState, cpu_weights, mean_weights
from training.learner.compute import Learner, Losses
from training.learner.optim import load_optimizer_tensors, optimizer_tensors
from training.node.process_group import NodeGroup
from training.node.step_counters import StepReport

Weights = dict[str, Tensor]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Stepped:
    """A step of the node.

    Attributes:
        parts: Of all its ranks.
        norm: The gradient's L2 norm before clipping.
        good: Whether loss and gradient were finite, so that the weights have changed.
    """

    parts: list[StepReport]
    norm: float
    good: bool


class Stepper(ABC):
    """One strategy at one rank.

    Args:
        learner: Model and optimizer.
        group: The node's ranks.

    Attributes:
        apart: Whether each rank keeps something that the others do not have, so that all leave checkpoints.
        turns: Batches that ranks may train on before they talk to each other again.
        measured: Fields of `StepReport` that the journal tells.
    """

    apart = True
    turns = 1
    measured: tuple[str, ...] = ()

    def __init__(self, learner: Learner, group: NodeGroup) -> None:
        self.learner, self.group = learner, group

    def begin(self, session: str) -> None:  # noqa: B027 - most strategies have nothing to do
        """The weights are those that a session begins with, at all nodes."""

    def start(self, step: int) -> None:  # noqa: B027
        """Training goes on from here."""

    def share(self, rows: Rows) -> Rows:
        """This rank's part of a batch."""
        return rows[self.group.rank :: self.group.size]

    @abstractmethod
    def step(self, losses: Losses, lost: bool, lr: float) -> None:
        """Apply the gradient that was just computed, as the strategy does.

        Args:
            losses: Of this rank's part of the batch.
            lost: Whether this rank has found too many damaged shards.
            lr: Learning rate of the step.
        """

    def after(self, step: int) -> None:  # noqa: B027
        """A step is over."""

    @abstractmethod
    def results(self) -> list[Stepped]:
        """The steps since the last call, as all ranks made them; all ranks call it together."""

    def idle(self, step: int) -> None:  # noqa: B027
        """There is nothing to train at present."""

    def fetch(self) -> bool:
        """Take over what others have, as a newcomer; False if no neighbour has finite weights."""
        return False

    def forget(self) -> None:  # noqa: B027
        """Other weights come, which are not the others'."""

    def conclude(self) -> None:  # noqa: B027
        """All work is done."""

    @abstractmethod
    def model(self) -> Weights | None:
        """The model as it would be if training ended now: at rank 0; all ranks call it together."""

    def keep(self) -> ReplicaState:
        """A copy of everything that a resume needs."""
        return keep(self.learner)

    def restore(self, kept: ReplicaState) -> None:
        """Put back what `keep` gave."""
        load_optimizer_tensors(self.learner.optimizer, kept.optimizer)
        self.learner.model.load_state_dict(kept.weights)

    def merge(self, replicas: list[Weights]) -> None:
        """Begin with what another number of ranks has left."""
        self.learner.model.load_state_dict(mean_weights(replicas))


def keep(learner: Learner, state: Weights | None = None) -> ReplicaState:
    """A copy of a learner's model and optimizer, and of what its strategy remembers."""
    copied = {name: tensor.detach().clone().cpu() for name, tensor in (state or {}).items()}
    return ReplicaState(cpu_weights(learner.model), optimizer_tensors(learner.optimizer), copied)
