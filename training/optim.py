"""Optimizers from a configuration, and their state as plain tensors (safetensors, never pickle)."""

from typing import Any

import torch
from torch import Tensor, nn

from training.config import OptimizerConfig
from training.flat import FlatParameters


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


def moment_names(cfg: OptimizerConfig) -> tuple[str, ...]:
    """What an optimizer keeps for every weight, by torch's names."""
    if cfg.kind == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if cfg.momentum else ()


class Moments:
    """An optimizer's state as flat vectors, laid out as the weights are.

    Args:
        cfg: Of the optimizer.
        optimizer: Over the model's parameters.
        flat: The model's weights.

    Attributes:
        names: Of the vectors.
        optimizer: Name of the optimizer and its vectors.
    """

    def __init__(self, cfg: OptimizerConfig, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> None:
        self.names = moment_names(cfg)
        self.optimizer = " ".join((cfg.kind, *self.names))
        self._optimizer, self._flat = optimizer, flat

    @torch.no_grad()
    def write(self, rows: Tensor, start: int, stop: int) -> float:
        """Write the moments of weights [start, stop).

        Args:
            rows: [names, stop - start], filled in; zero where there is no state, as for averaged buffers.

        Returns:
            Steps that the optimizer has made; 0 if it has no state.
        """
        rows.zero_()
        steps = 0.0
        for parameter, (first, last) in zip(self._flat.parameters, self._flat.spans, strict=True):
            entries, low, high = self._optimizer.state.get(parameter), max(first, start), min(last, stop)
            if not entries:
                continue
            steps = steps or float(entries.get("step", 1.0))  # SGD does not count its steps
            for row, name in zip(rows, self.names, strict=True):
                if low < high:
                    row[low - start : high - start].copy_(entries[name].flatten()[low - first : high - first])
        return steps

    def load(self, rows: Tensor, steps: float) -> None:
        """Replace the state.

        Args:
            rows: [names, num_weights], as `write` gives them for all weights.
            steps: Steps that the optimizer has made.
        """
        groups = self._optimizer.param_groups
        numbers = {id(p): number for number, p in enumerate(p for group in groups for p in group["params"])}
        tensors: dict[str, Tensor] = {}
        for parameter, (first, last) in zip(self._flat.parameters, self._flat.spans, strict=True):
            number = numbers[id(parameter)]
            for row, name in zip(rows, self.names, strict=True):
                tensors[f"{number}.{name}"] = row[first:last].view(parameter.shape).clone()
            if "exp_avg" in self.names:
                tensors[f"{number}.step"] = torch.tensor(float(steps))
        load_optimizer_tensors(self._optimizer, tensors)


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
