"""One share of a model's weights with its optimizer: the arithmetic of a server process."""

import torch
from torch import Tensor, nn

from training.config import OptimizerConfig
from training.learner.optim import (
    Rate,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from training.parameter_server.layout import SCALARS, Layout

_STATE = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
"""State that an optimizer keeps per parameter."""


class ShareError(ValueError):
    """A request does not match the share; the message names a remedy."""


class Share:
    """Flat weights, of which the first `layout.num_grads` have gradients, and an optimizer over their pieces.

    Args:
        layout: The share's part of the model.
        cfg: The optimizer; matrices get weight decay and vectors do not, as in a single process.

    Attributes:
        weights: Weights of the share [layout.size], float32.
        version: Number of gradients applied since `begin`.
        session: Training session of the weights; "" before `begin`.
    """

    def __init__(self, layout: Layout, cfg: OptimizerConfig) -> None:
        self.layout, self.cfg = layout, cfg
        self.version, self.session = 0, ""
        self.weights = torch.zeros(layout.size)
        self._grads = torch.zeros(layout.num_grads)
        pieces = nn.ParameterList()
        rates: dict[Tensor, Rate] = {}
        start = 0
        for piece in layout.pieces:
            stop = start + piece.stop - piece.first
            parameter = nn.Parameter(self.weights[start:stop].view(piece.kept_shape))
            parameter.grad = self._grads[start:stop].view(piece.kept_shape)
            pieces.append(parameter)
            rates[parameter] = Rate(piece.scale)
            start = stop
        self._optimizer = build_optimizer(cfg, pieces, rates)
        # the optimizer numbers the pieces in the order in which the whole model's optimizer numbers the parameters
        self._numbers = sorted(piece.number for piece in layout.pieces)

    def begin(self, session: str, weights: Tensor, tensors: dict[str, Tensor]) -> None:
        """Initialize the share for a session.

        Args:
            session: Name of the training session.
            weights: Weights of the share [layout.size].
            tensors: Flat optimizer state of the pieces, by name; empty for a fresh optimizer.

        Raises:
            ShareError: If they do not match the share, or are not finite.
        """
        if not session:
            raise ShareError("init needs the name of a session")
        self._need_finite(weights, "weights")
        state = self._own_state(tensors)
        self.weights.copy_(weights)
        self._optimizer.state.clear()
        if state:
            load_optimizer_tensors(self._optimizer, state)
        self.session, self.version = session, 0

    def _own_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename and reshape optimizer tensors for the share's own optimizer."""
        kinds = _STATE[self.cfg.kind]
        wanted = {f"{number}.{kind}" for number in self._numbers for kind in kinds}
        if tensors and tensors.keys() != wanted:
            name = sorted(tensors.keys() ^ wanted)[0]
            raise ShareError(
                f"optimizer tensor {name} is missing or unknown: is it from another model, or from another optimizer "
                f"than train.optimizer.kind={self.cfg.kind}?"
            )
        own = {}
        pieces = {piece.number: piece for piece in self.layout.pieces}
        for name, values in tensors.items():
            number, kind = name.split(".", 1)
            shape = () if kind in SCALARS else pieces[int(number)].kept_shape
            if values.numel() != torch.Size(shape).numel():
                raise ShareError(f"optimizer tensor {name} has {values.numel()} values: is it from another model?")
            self._need_finite(values, name)
            own[f"{self._numbers.index(int(number))}.{kind}"] = values.view(shape)
        return own

    def push(self, grads: Tensor, version: int, lr: float) -> int:
        """Make one optimizer step.

        Args:
            grads: Gradients [layout.num_grads].
            version: Version of the weights at which they were computed.
            lr: Learning rate.

        Returns:
            The gradient's staleness: steps made since that version. Weights pulled before a restart may have a version
            that the server has not reached again; they count as fresh.

        Raises:
            ShareError: If a gradient is not finite.
        """
        self._need_finite(grads, "gradients")
        staleness = max(0, self.version - version)
        self._grads.copy_(grads)
        set_learning_rate(self._optimizer, lr)
        self._optimizer.step()
        self.version += 1
        return staleness

    def elastic(self, vector: Tensor, alpha: float) -> Tensor:
        """Move the weights towards a learner's x: d = alpha (x - weights); weights += d. Returns d.

        Raises:
            ShareError: If a value is not finite.
        """
        self._need_finite(vector, "weights")
        drawn = alpha * (vector - self.weights)
        self.weights.add_(drawn)
        return drawn

    def tensors(self) -> dict[str, Tensor]:
        """Copy of the flat optimizer state, by the whole model's names."""
        tensors = {}
        for name, tensor in optimizer_tensors(self._optimizer).items():
            number, kind = name.split(".", 1)
            tensors[f"{self._numbers[int(number)]}.{kind}"] = tensor.flatten()
        return tensors

    def _need_finite(self, values: Tensor, what: str) -> None:
        if not bool(torch.isfinite(values).all()):
            raise ShareError(f"{what} of parameter server {self.layout.number}'s share are not finite numbers")
