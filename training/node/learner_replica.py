"""A learner's weights and optimizer, as its strategy's program sees them."""

import math

from torch import Tensor

from training.learner.compute import Learner
from training.learner.optim import drop_momentum
from training.node.shared_weights import SharedWeights


class LearnerReplica:
    """A learner's weights and optimizer; see `training.strategies.base.Replica`.

    Args:
        learner: Model and optimizer.
        shared: Memory that the weights are in, for hogwild.

    Attributes:
        lr: Learning rate of the next update.
        norm: L2 norm of the last gradient before it was clipped.
        scaled: Whether the gradients are clipped already, and finite.
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
        """Optimizer steps made on these weights, by all that share them."""
        return self.shared.updates() if self.shared else self._updates

    def clip(self) -> bool:
        """Clip the gradients; whether they are finite."""
        self.norm = self.learner.scale_gradient(1.0)
        return math.isfinite(self.norm)

    def update(self) -> None:
        """One optimizer step; a gradient that is not finite changes nothing."""
        if self.scaled or self.clip():
            self.learner.update(self.lr)
            self._updates += 1
            if self.shared:
                self.shared.count()

    def drop_momentum(self) -> None:
        """Let the next update follow from its gradient alone."""
        drop_momentum(self.learner.optimizer)
