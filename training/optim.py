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
    fused = in_one_pass(cfg, decayed[0].device if decayed else None)
    if cfg.kind == "sgd":
        return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, fused=fused)


def in_one_pass(cfg: OptimizerConfig, device: torch.device | None) -> bool:
    """Whether an update is one fused pass over all parameters of a device, which needs no memory of its own.

    torch's default on a GPU, `foreach`, takes as much as the gradients once more. Its loop on a CPU takes memory for
    one parameter at a time; for AdamW it took an eighth of a small model's step. SGD's fused pass rounds otherwise.
    """
    return cfg.kind == "adamw" or (device is not None and device.type == "cuda")


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
    """An optimizer's state as flat vectors, laid out as the weights are, and made before the first step.

    torch would make it in that step: too late to know how large a batch a GPU's memory holds.

    Args:
        cfg: Of the optimizer.
        optimizer: Over the model's parameters, without state; it gets that of a first step, zeros.
        flat: The model's weights.

    Attributes:
        names: Of the vectors.
        optimizer: Name of the optimizer and its vectors.
    """

    def __init__(self, cfg: OptimizerConfig, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> None:
        self.names = moment_names(cfg)
        self.optimizer = " ".join((cfg.kind, *self.names))
        device = flat.weights.device
        self._values = torch.zeros(len(self.names), flat.num_parameters, device=device)
        # the fused kernel counts for each parameter, and on its device; SGD does not count
        self._steps = torch.zeros(len(flat.parameters) if cfg.kind == "adamw" else 0, device=device)
        if not self.names:
            return
        spans = dict(zip(flat.parameters, flat.spans, strict=True))
        for number, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
            start, stop = spans[parameter]
            views = (row[start:stop].view(parameter.shape) for row in self._values)
            counted = {"step": self._steps[number]} if len(self._steps) else {}
            optimizer.state[parameter] = counted | dict(zip(self.names, views, strict=True))

    @torch.no_grad()
    def clear(self) -> None:
        """Become the state of an optimizer without a past."""
        self._values.zero_()
        self._steps.zero_()

    @torch.no_grad()
    def write(self, rows: Tensor, start: int, stop: int) -> float:
        """Write the moments of weights [start, stop).

        Args:
            rows: [names, stop - start], filled in; zero for averaged buffers, which have none.

        Returns:
            Steps that the optimizer has made; 0 if it has no past, 1 if it has one and does not count.
        """
        rows.zero_()
        for row, values in zip(rows, self._values, strict=True):
            part = values[start:stop]
            row[: len(part)].copy_(part)
        return float(self._steps[0]) if len(self._steps) else float(self._values.any())

    @torch.no_grad()
    def load(self, rows: Tensor, steps: float) -> None:
        """Replace the state.

        Args:
            rows: [names, num_weights], as `write` gives them for all weights.
            steps: Steps that the optimizer has made.
        """
        self._values.copy_(rows[:, : self._values.shape[1]])
        self._steps.fill_(steps)


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
    """A copy of the optimizer's state by name: `<parameter number>.<state name>`; scalars become tensors."""
    return {name: value.detach().clone().cpu().contiguous() for name, value in _named_state(optimizer).items()}


@torch.no_grad()
def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave, in the memory that the optimizer's state has, if there is some.

    Hyper-parameters stay those of the optimizer itself.

    Args:
        optimizer: Over parameters of the same shapes.
        tensors: Its state by name; empty for an optimizer without a past.

    Raises:
        ValueError: They are not of this model and optimizer.
    """
    if not optimizer.state:
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            number, name = key.split(".", 1)
            state.setdefault(int(number), {})[name] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return
    memory = _named_state(optimizer)
    shapes, given = ({key: one.shape for key, one in part.items()} for part in (memory, tensors))
    if tensors and given != shapes:
        name = min(key for key in {**given, **shapes} if given.get(key) != shapes.get(key))
        raise ValueError(f"optimizer state {name} is missing, unknown or of another shape: is it of another model?")
    for key, kept in memory.items():
        kept.copy_(tensors[key]) if tensors else kept.zero_()
