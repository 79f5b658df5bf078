"""Replicas of a real model, and their gradients: many small models at once where that is faster."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from training.config import OptimizerConfig
from training.learner.flat import FlatParameters
from training.learner.optim import build_optimizer, drop_momentum, set_learning_rate


class _WholeModel(nn.Module):
    """All trainable parameters of a model as one."""

    def __init__(self, flat: FlatParameters) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(0))
        self.view(flat)

    def view(self, flat: FlatParameters) -> None:
        """Lie where a model's parameters lie now."""
        self.parameter.data = flat.weights[: flat.num_parameters]
        self.parameter.grad = flat.grads


class ModelReplica:
    """A model with flat parameters and an optimizer of its own."""

    def __init__(self, model: nn.Module, cfg: OptimizerConfig) -> None:
        self._flat = FlatParameters(model)
        self._cfg, self._whole = cfg, _WholeModel(self._flat)
        # without weight decay all parameters are alike: one long one is updated in a tenth of the time
        self._optimizer = build_optimizer(cfg, model if cfg.weight_decay else self._whole)
        self._count = [0]
        self.num_bytes = 4.0 * self._flat.weights.numel()

    @property
    def weights(self) -> Tensor:
        """See `Replica`."""
        return self._flat.weights

    @property
    def grads(self) -> Tensor:
        """See `Replica`."""
        return self._flat.grads

    @property
    def updates(self) -> int:
        """See `Replica`."""
        return self._count[0]

    @torch.no_grad()
    def update(self) -> None:
        """Clip, then one optimizer step."""
        clip = self._cfg.clip_norm
        if clip:
            norm = float(self._flat.grad_norm())
            if clip < norm < float("inf"):
                self._flat.grads.mul_(clip / (norm + 1e-6))
        self._optimizer.step()
        self._count[0] += 1

    def drop_momentum(self) -> None:
        """See `Replica`."""
        drop_momentum(self._optimizer)

    def set_rate(self, lr: float) -> None:
        """See `Trainable`."""
        set_learning_rate(self._optimizer, lr)

    def copy_from(self, other: Any) -> None:
        """See `Trainable`."""
        self._flat.load(other.weights)
        self._optimizer.load_state_dict(copy.deepcopy(other._optimizer.state_dict()))

    def share(self, other: Any) -> None:
        """See `Trainable`."""
        flat = self._flat
        flat.weights, self._count = other.weights, other._count
        self._whole.view(flat)
        for parameter, (start, stop) in zip(flat.parameters, flat.spans, strict=True):
            parameter.data = flat.weights[start:stop].view(parameter.shape)


class Stack:
    """Runs many sets of weights of one model at once (torch.func.vmap), for models of operations that allow it.

    Args:
        model: Any replica of it; its own weights are not used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shapes = [(name, p.shape, p.numel()) for name, p in model.named_parameters() if p.requires_grad]

    def __call__(self, weights_RN: Tensor, *inputs: Tensor) -> Any:
        """Outputs of the model with each of R sets of flat weights, every one on its own part [r] of the inputs."""

        def one(parameters: dict[str, Tensor], *parts: Tensor) -> Any:
            return torch.func.functional_call(self._model, parameters, parts)

        # one split, whose backward pass is one concatenation: a slice for each parameter would fill a gradient of the
        # whole stack with zeros each time, which took more than half of a step
        parts = weights_RN.split_with_sizes([count for _, _, count in self._shapes], dim=1)
        named = {name: part.view(-1, *shape) for (name, shape, _), part in zip(self._shapes, parts, strict=True)}
        # the fused attention kernels have no rule for this and would run one by one
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.vmap(one, randomness="different")(named, *inputs)


def one_by_one(
    scratch: FlatParameters, weights: Sequence[Tensor], losses: Sequence[Callable[[], Tensor]], into: Sequence[Tensor]
) -> None:
    """Gradients of losses that are computed with `scratch`'s model, each at its own weights."""
    for values, loss, grads in zip(weights, losses, into, strict=True):
        scratch.load(values)
        scratch.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        grads.copy_(scratch.grads)
