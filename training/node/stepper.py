"""The stepper: what a rank does between two gradients, communication with other learners and the update."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.learner.checkpoint import ReplicaState, mean_weights
from training.learner.compute import Learner, Losses
from training.learner.optim import load_optimizer_tensors, optimizer_tensors
from training.node.process_group import NodeGroup
from training.node.step_counters import StepReport

Weights = dict[str, Tensor]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Stepped:
    """Result of a node's step.

    Attributes:
        parts: Reports of all ranks.
        norm: The gradient's L2 norm before clipping.
        good: Whether loss and gradient were finite, so that the weights were updated.
    """

    parts: list[StepReport]
    norm: float
    good: bool


class Stepper(ABC):
    """Runs a strategy at one rank.

    Args:
        learner: Model and optimizer.
        group: The node's ranks.

    Attributes:
        state_per_rank: Whether the ranks' states differ, so that every rank writes its part of a checkpoint.
        turns: Batches that ranks may train on before they communicate again.
        measured: Fields of `StepReport` for the journal.
    """

    state_per_rank = True
    turns = 1
    measured: tuple[str, ...] = ()

    def __init__(self, learner: Learner, group: NodeGroup) -> None:
        self.learner, self.group = learner, group

    def begin(self, session: str) -> None:  # noqa: B027 - most strategies have nothing to do
        """Called when a session starts, with the same weights on all nodes."""

    def start(self, step: int) -> None:  # noqa: B027
        """Called before the first step after the weights were set, at the start or later."""

    def share(self, rows: Rows) -> Rows:
        """This rank's part of a batch."""
        return rows[self.group.rank :: self.group.size]

    @abstractmethod
    def step(self, losses: Losses, lost: bool, lr: float) -> None:
        """Apply the gradient that was just computed, as the strategy does.

        Args:
            losses: Sums over this rank's part of the batch.
            lost: Whether this rank has found too many damaged shards.
            lr: Learning rate of the step.
        """

    def after(self, step: int) -> None:  # noqa: B027
        """Called after each step."""

    @abstractmethod
    def results(self) -> list[Stepped]:
        """Results of the steps since the last call, over all ranks; all ranks call it together."""

    def idle(self, step: int) -> None:  # noqa: B027
        """Called repeatedly while there is nothing to train."""

    def fetch(self) -> bool:
        """Take the weights of other nodes, as a newcomer; False if no neighbour has finite weights."""
        return False

    def forget(self) -> None:  # noqa: B027
        """Called before other weights than those of running learners are loaded: drop what belongs to the old ones."""

    def conclude(self) -> None:  # noqa: B027
        """Called when all batches are trained."""

    @abstractmethod
    def model(self) -> Weights | None:
        """The model that training would give if it ended now, at rank 0; all ranks call it together."""

    def keep(self) -> ReplicaState:
        """Copy everything that a resume needs."""
        return keep(self.learner)

    def restore(self, kept: ReplicaState) -> None:
        """Restore what `keep` returned."""
        load_optimizer_tensors(self.learner.optimizer, kept.optimizer)
        self.learner.load_state(kept.weights)

    def merge(self, replicas: list[Weights]) -> None:
        """Start from the replicas of a checkpoint that another number of ranks wrote."""
        self.learner.load_state(mean_weights(replicas))


def keep(learner: Learner, state: Weights | None = None) -> ReplicaState:
    """Copy a learner's model, its optimizer, and the state of its strategy."""
    copied = {name: tensor.detach().clone().cpu() for name, tensor in (state or {}).items()}
    return ReplicaState(learner.state(), optimizer_tensors(learner.optimizer), copied)
