"""Builds optimizers from a configuration, and converts their state to plain tensors (safetensors, never pickle)."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from training.config import AdamWConfig, OptimizerConfig, SgdConfig


class Rate(NamedTuple):
    """How a parameter's learning rate differs from that of the schedule."""

    scale: float = 1.0
    """Factor."""
    until: int = 0
    """Epochs in which it is zero."""

    def at(self, lr: float, epoch: float) -> float:
        """The parameter's rate in an epoch, from 0, whose rate is `lr`."""
        return lr * self.scale if epoch >= self.until else 0.0


Rates = Mapping[Tensor, Rate]
"""Of the parameters whose rate differs from the schedule's."""


def build_optimizer(
    cfg: OptimizerConfig, model: nn.Module, rates: Rates = MappingProxyType({})
) -> torch.optim.Optimizer:
    """Build an optimizer over the model's parameters; weight decay applies to matrices, not to vectors.

    Args:
        cfg: Kind and constants.
        model: Whose parameters.
        rates: Learning rates that differ from the schedule's.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "params": [trained[number] for number in numbers],
            "weight_decay": 0.0 if is_vector else cfg.weight_decay,
            "rate": rate,
        }
        for (is_vector, rate), numbers in parameter_groups(trained, rates).items()
    ]
    decayed = next((p for p in trained if p.ndim > 1), None)
    fused = in_one_pass(cfg, decayed.device if decayed is not None else None)
    if isinstance(cfg, SgdConfig):
        return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=fused)
    assert isinstance(cfg, AdamWConfig), cfg.kind
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, fused=fused)


def parameter_groups(parameters: Sequence[Tensor], rates: Rates) -> dict[tuple[bool, Rate], list[int]]:
    """Numbers of the parameters in each of the optimizer's groups, in the optimizer's order: matrices come first.

    The order of the groups does not depend on which parameters there are, so that a part of them keeps it.

    Args:
        parameters: Trained parameters.
        rates: Learning rates that differ from the schedule's.
    """
    groups: dict[tuple[bool, Rate], list[int]] = {(False, Rate()): [], (True, Rate()): []}
    for number, parameter in enumerate(parameters):
        groups.setdefault((parameter.ndim <= 1, rates.get(parameter, Rate())), []).append(number)
    return dict(sorted(groups.items()))


def in_one_pass(cfg: OptimizerConfig, device: torch.device | None) -> bool:
    """Whether to use torch's fused update, one pass over all parameters of a device without temporary memory.

    torch's default on a GPU, `foreach`, needs as much memory again as the gradients. Its loop on a CPU needs memory for
    one parameter at a time; for AdamW it took an eighth of a small model's step. SGD's fused update on a CPU would
    round differently.
    """
    return cfg.kind == "adamw" or (device is not None and device.type == "cuda")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, epoch: float = math.inf) -> None:
    """Set the learning rate of every parameter group of `build_optimizer`.

    Args:
        optimizer: The optimizer.
        lr: Learning rate of the schedule.
        epoch: The epoch, from 0, in which some parameters may still be frozen.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["rate"].at(lr, epoch)


@torch.no_grad()
def drop_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Set SGD's velocity and AdamW's first moment to zero: the next step depends on its gradient alone."""
    for entries in optimizer.state.values():
        for name in ("momentum_buffer", "exp_avg"):
            if entries.get(name) is not None:
                entries[name].zero_()


def num_moments(cfg: OptimizerConfig) -> int:
    """Values of optimizer state per weight, for an estimate of memory."""
    return int(bool(cfg.momentum)) if isinstance(cfg, SgdConfig) else 2


def _named_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by name: `<parameter number>.<state name>`."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value)
        for number, entries in state.items()
        for name, value in entries.items()
        if value is not None
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copy the optimizer's state by name (`<parameter number>.<state name>`); scalars become tensors."""
    return {name: value.detach().clone().cpu().contiguous() for name, value in _named_state(optimizer).items()}


@torch.no_grad()
def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` returned, in place if the optimizer has state already.

    Hyper-parameters of the optimizer do not change.

    Args:
        optimizer: Optimizer of parameters with the same shapes.
        tensors: Its state by name; empty for the state of a new optimizer.

    Raises:
        ValueError: If they are not of this model and optimizer.
    """
    if not optimizer.state:
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            number, name = key.split(".", 1)
            state.setdefault(int(number), {})[name] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return
    memory = _named_state(optimizer)
    shapes, given = ({key: tensor.shape for key, tensor in part.items()} for part in (memory, tensors))
    if tensors and given != shapes:
        name = min(key for key in {**given, **shapes} if given.get(key) != shapes.get(key))
        raise ValueError(f"optimizer state {name} is missing, unknown or of another shape: is it of another model?")
    for key, kept in memory.items():
        kept.copy_(tensors[key]) if tensors else kept.zero_()
