"""Replicas of a real model, and their gradients: many small models at once where that is faster."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from training.config import OptimizerConfig
from training.flat import FlatParameters
from training.optim import build_optimizer, set_learning_rate


class ModelReplica:
    """A model with flat parameters and an optimizer of its own."""

    def __init__(self, model: nn.Module, cfg: OptimizerConfig) -> None:
        self._flat = FlatParameters(model)
        self._cfg, self._optimizer = cfg, build_optimizer(cfg, model)
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

        def one(weights_N: Tensor, *parts: Tensor) -> Any:
            start, named = 0, {}
            for name, shape, count in self._shapes:
                named[name] = weights_N[start : start + count].view(shape)
                start += count
            return torch.func.functional_call(self._model, named, parts)

        # the fused attention kernels have no rule for this and would run one by one
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.vmap(one, randomness="different")(weights_RN, *inputs)


def one_by_one(
    scratch: FlatParameters, weights: Sequence[Tensor], losses: Sequence[Callable[[], Tensor]], into: Sequence[Tensor]
) -> None:
    """Gradients of losses that are computed with `scratch`'s model, each at its own weights."""
    for values, loss, grads in zip(weights, losses, into, strict=True):
        scratch.load(values)
        scratch.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        grads.copy_(scratch.grads)
