"""An optimizer's state per weight as flat vectors, so that a newcomer can take it from a neighbour."""

from typing import Any

import torch
from torch import Tensor

from training.learner.flat import FlatParameters


def moment_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of an optimizer's per-weight state tensors in torch; empty for one that has none or is not known here."""
    options = optimizer.defaults
    if type(optimizer) is torch.optim.SGD:
        # with dampening, the first step differs from one with a momentum of zero
        return ("momentum_buffer",) if options["momentum"] and not options["dampening"] else ()
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ()))
    return ()


class Moments:
    """An optimizer's state as flat vectors in the order of the weights, allocated before the first step.

    torch would allocate it in that step: too late to know how large a batch fits into a GPU's memory.

    Args:
        optimizer: Optimizer of the model's parameters; state that it has already is kept.
        flat: The model's weights.

    Attributes:
        names: Names of the vectors.
        optimizer: Names of the optimizer and its vectors, to compare with another node's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> None:
        self.names = moment_names(optimizer)
        self.optimizer = " ".join((type(optimizer).__name__.lower(), *self.names))
        device = flat.weights.device
        self._values = torch.zeros(len(self.names), flat.num_parameters, device=device)
        counts = "exp_avg" in self.names
        # Adam's fused kernel keeps a step count per parameter, on its device; SGD has none
        on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        self._steps = torch.zeros(len(flat.parameters) if counts else 0, device=device if on_device else "cpu")
        if self.names:
            self._adopt(optimizer, flat)

    @torch.no_grad()
    def _adopt(self, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> None:
        places = dict(zip(flat.parameters, enumerate(flat.spans), strict=True))
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter not in places:  # frozen: the optimizer skips it
                continue
            number, (start, stop) = places[parameter]
            views: dict[str, Any] = {"step": self._steps[number]} if len(self._steps) else {}
            rows = (row[start:stop].view(parameter.shape) for row in self._values)
            views |= zip(self.names, rows, strict=True)
            present = optimizer.state.get(parameter, {})
            for name, view in views.items():
                if present.get(name) is not None:
                    view.copy_(torch.as_tensor(present[name]))
            optimizer.state[parameter] = views

    @torch.no_grad()
    def clear(self) -> None:
        """Set the state to that of a new optimizer."""
        self._values.zero_()
        self._steps.zero_()

    @torch.no_grad()
    def write(self, rows: Tensor, start: int, stop: int) -> float:
        """Copy the moments of weights [start, stop).

        Args:
            rows: Output [names, stop - start]; zero for averaged buffers, which have no moments.

        Returns:
            Steps that the optimizer has made with the parameters that were trained from the start; without a step
            count, 1 if any moment differs from zero, else 0.
        """
        rows.zero_()
        for row, values in zip(rows, self._values, strict=True):
            part = values[start:stop]
            row[: len(part)].copy_(part)
        return float(self._steps.max()) if len(self._steps) else float(self._values.any())

    @torch.no_grad()
    def load(self, rows: Tensor, steps: float) -> None:
        """Replace the state.

        Args:
            rows: [names, num_weights], as `write` returns them for all weights.
            steps: Steps that the optimizer has made.
        """
        self._values.copy_(rows[:, : self._values.shape[1]])
        self._steps.fill_(steps)
