"""Optimizers from a configuration, and their state as plain tensors (safetensors, never pickle)."""

from typing import Any

import torch
from torch import Tensor, nn

from training.config import OptimizerConfig


def build_optimizer(cfg: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over the model's parameters, matrices with weight decay and vectors without."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": cfg.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if cfg.kind == "sgd":
        return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum)
    # fused: one pass over all parameters; torch's loop over them took an eighth of a small model's step on a CPU
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def drop_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Let the next step follow from its gradient alone: SGD's velocity and AdamW's first moment become zero."""
    for entries in optimizer.state.values():
        for name in ("momentum_buffer", "exp_avg"):
            if entries.get(name) is not None:
                entries[name].zero_()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of the optimizer's state by name: `<parameter number>.<state name>`; scalars become tensors."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value).detach().clone().cpu().contiguous()
        for number, entries in state.items()
        for name, value in entries.items()
        if value is not None
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; hyper-parameters stay those of the optimizer itself."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
