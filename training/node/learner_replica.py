"""The replica that a strategy's program sees: a real learner's weights and optimizer."""

import math

from torch import Tensor

from training.learner.compute import Learner
from training.learner.optim import drop_momentum
from training.node.shared_weights import SharedWeights


class LearnerReplica:
    """A learner's weights and optimizer; implements `training.strategies.base.Replica`.

    Args:
        learner: Model and optimizer.
        shared: Memory that holds the weights, for hogwild.

    Attributes:
        lr: Learning rate of the next update.
        norm: L2 norm of the last gradient before clipping.
        scaled: Whether the gradients are already clipped, and finite.
    """

    def __init__(self, learner: Learner, shared: SharedWeights | None = None) -> None:
        self.learner, self.shared = learner, shared
        self.num_bytes = 4.0 * learner.flat.weights.numel()
        self.lr = self.norm = 0.0
        self.scaled = False
        self._updates = 0

    @property
    def weights(self) -> Tensor:
        """Flat fp32 weights."""
        return self.learner.flat.weights

    @property
    def grads(self) -> Tensor:
        """Flat gradients."""
        return self.learner.flat.grads

    @property
    def updates(self) -> int:
        """Optimizer steps on these weights, by all learners that share them."""
        return self.shared.updates() if self.shared else self._updates

    def clip(self) -> bool:
        """Clip the gradients, and return whether they are finite."""
        self.norm = self.learner.scale_gradient(1.0)
        return math.isfinite(self.norm)

    def update(self) -> None:
        """Make one optimizer step; a non-finite gradient is skipped."""
        if self.scaled or self.clip():
            self.learner.update(self.lr)
            self._updates += 1
            if self.shared:
                self.shared.count()

    def drop_momentum(self) -> None:
        """Reset the momentum: the next update depends on its gradient alone."""
        drop_momentum(self.learner.optimizer)
