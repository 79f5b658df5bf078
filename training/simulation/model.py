"""Replicas of a real model, and their gradients, for several small models at once if that is faster."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from training.config import OptimizerConfig
from training.learner.flat import FlatParameters
from training.learner.optim import build_optimizer, drop_momentum, set_learning_rate


class _WholeModel(nn.Module):
    """All trainable parameters of a model as a single one."""

    def __init__(self, flat: FlatParameters) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(0))
        self.view(flat)

    def view(self, flat: FlatParameters) -> None:
        """Become a view of a model's flat parameters."""
        self.parameter.data = flat.weights[: flat.num_parameters]
        self.parameter.grad = flat.grads


class ModelReplica:
    """A model with flat parameters and an optimizer of its own."""

    def __init__(self, model: nn.Module, cfg: OptimizerConfig) -> None:
        self._flat = FlatParameters(model)
        self._cfg, self._whole = cfg, _WholeModel(self._flat)
        # without weight decay all parameters are treated alike: a single long one is updated in a tenth of the time
        self._optimizer = build_optimizer(cfg, model if cfg.weight_decay else self._whole)
        self._count = [0]
        self.num_bytes = 4.0 * self._flat.weights.numel()

    @property
    def weights(self) -> Tensor:
        """Flat fp32 weights."""
        return self._flat.weights

    @property
    def grads(self) -> Tensor:
        """Flat gradients."""
        return self._flat.grads

    @property
    def updates(self) -> int:
        """Optimizer steps on these weights, by all replicas that share them."""
        return self._count[0]

    @torch.no_grad()
    def update(self) -> None:
        """Clip the gradients, then make one optimizer step."""
        clip = self._cfg.clip_norm
        if clip:
            norm = float(self._flat.grad_norm())
            if clip < norm < float("inf"):
                self._flat.grads.mul_(clip / (norm + 1e-6))
        self._optimizer.step()
        self._count[0] += 1

    def drop_momentum(self) -> None:
        """Reset the momentum: the next update depends on its gradient alone."""
        drop_momentum(self._optimizer)

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next updates."""
        set_learning_rate(self._optimizer, lr)

    def copy_from(self, other: Self) -> None:
        """Copy another replica's weights and optimizer state."""
        self._flat.load(other.weights)
        self._optimizer.load_state_dict(copy.deepcopy(other._optimizer.state_dict()))

    def share(self, other: Self) -> None:
        """Become a view of another replica's weights, with an optimizer of its own."""
        flat = self._flat
        flat.weights, self._count = other.weights, other._count
        self._whole.view(flat)
        for parameter, (start, stop) in zip(flat.parameters, flat.spans, strict=True):
            parameter.data = flat.weights[start:stop].view(parameter.shape)


class Stack:
    """Runs a model with many sets of weights at once (torch.func.vmap), if all its operations support that.

    Args:
        model: The model; its own weights are not used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shapes = [(name, p.shape, p.numel()) for name, p in model.named_parameters() if p.requires_grad]

    def __call__(self, weights_RN: Tensor, *inputs: Tensor) -> Any:
        """Outputs of the model for R sets of flat weights, set r with inputs [r]."""

        def replica(parameters: dict[str, Tensor], *parts: Tensor) -> Any:
            return torch.func.functional_call(self._model, parameters, parts)

        # A single split, whose backward pass is a concatenation: the backward pass of a slice per parameter fills a
        # gradient of the whole stack with zeros each time, which took more than half of a step.
        parts = weights_RN.split_with_sizes([count for _, _, count in self._shapes], dim=1)
        named = {name: part.view(-1, *shape) for (name, shape, _), part in zip(self._shapes, parts, strict=True)}
        # the fused attention kernels have no vmap rule and would run in a loop
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.vmap(replica, randomness="different")(named, *inputs)


def one_by_one(
    scratch: FlatParameters, weights: Sequence[Tensor], losses: Sequence[Callable[[], Tensor]], into: Sequence[Tensor]
) -> None:
    """Compute the gradients of losses with `scratch`'s model one after the other, each at its own weights."""
    for values, loss, grads in zip(weights, losses, into, strict=True):
        scratch.load(values)
        scratch.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        grads.copy_(scratch.grads)
