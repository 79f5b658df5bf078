"""A model's parameters in one contiguous buffer, its gradients in another: averaging is one pass over memory."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

EMA = "ema:"
"""Before the name of a weight: its moving average."""
EMA_STEPS = "ema:steps"


class FlatParameters:
    """Moves a model's float32 parameters, followed by its averaged buffers, into one contiguous tensor.

    Parameters and buffers become views of it: writing to `weights` changes the model. Gradients are views of `grads`,
    which covers the trainable parameters only. Frozen parameters are not moved (`training.learner.trained`).

    Args:
        model: The model, already on its device; its parameters' storage is replaced.

    Attributes:
        weights: Parameters, then buffers [num_weights], float32.
        grads: Gradients of the parameters [num_parameters], in the same order.
        names: Name of each parameter and buffer.

    Raises:
        ValueError: If a trainable parameter is not float32; mixed precision keeps float32 weights here.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        wrong = next((n for n, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32), None)
        if wrong is not None:
            raise ValueError(f"parameter {wrong} is not float32: keep weights in float32 and use autocast (train.amp)")
        buffers = dict(_averaged_buffers(model))
        self._buffers = list(buffers.values())
        self.names = [*(name for name, p in model.named_parameters() if p.requires_grad), *buffers]
        self.num_parameters = sum(p.numel() for p in self.parameters)
        total = self.num_parameters + sum(b.numel() for b in self._buffers)
        device = self.parameters[0].device
        self.weights = torch.empty(total, device=device)
        self.grads = torch.zeros(self.num_parameters, device=device)
        self.spans: list[tuple[int, int]] = []
        """Range of each parameter in the buffer: [start, stop)."""
        self._adopt()

    def _adopt(self) -> None:
        start = 0
        with torch.no_grad():
            for tensor in self.averaged():
                stop = start + tensor.numel()
                view = self.weights[start:stop].view(tensor.shape)
                view.copy_(tensor)
                tensor.data = view
                if isinstance(tensor, nn.Parameter):
                    self.spans.append((start, stop))
                    tensor.grad = self.grads[start:stop].view(tensor.shape)
                start = stop

    def averaged(self) -> list[Tensor]:
        """The parameters and buffers, in the order in which they are in the buffer."""
        return [*self.parameters, *self._buffers]

    @torch.no_grad()
    def move(self, weights: Tensor) -> None:
        """Replace the model's buffer by another one and its values, shared memory for example.

        Args:
            weights: [num_weights], float32, on the same device.
        """
        start = 0
        for tensor in self.averaged():
            stop = start + tensor.numel()
            tensor.data = weights[start:stop].view(tensor.shape)
            start = stop
        self.weights = weights

    @torch.no_grad()
    def gather_grads(self) -> None:
        """Make the gradients views of `grads` again where they are not: `Optimizer.zero_grad` replaces them by None."""
        for parameter, (start, stop) in zip(self.parameters, self.spans, strict=True):
            view = self.grads[start:stop].view(parameter.shape)
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view

    def zero_grad(self) -> None:
        """Clear all gradients in one pass; they stay views of `grads`."""
        self.grads.zero_()

    def grad_norm(self) -> Tensor:
        """L2 norm of all gradients, a scalar."""
        norm: Tensor = torch.linalg.vector_norm(self.grads)
        return norm

    @torch.no_grad()
    def load(self, weights: Tensor) -> None:
        """Copy the weights [num_weights] of another replica.

        Raises:
            ValueError: If their number differs.
        """
        if weights.shape != self.weights.shape:
            raise ValueError(f"{weights.numel()} weights for a model of {self.weights.numel()}: is it another model?")
        self.weights.copy_(weights)


class MovingAverage:
    """An exponential moving average of flat weights, one update a step (Polyak and Juditsky 1992).

        average += (1 - d) (weights - average), with d = min(decay, (1 + t) / (10 + t)) after t steps

    The smaller d of the first steps keeps the initial weights, which are far from any later ones, out of the average.

    Args:
        flat: The weights.
        decay: Decay per step.

    Attributes:
        values: The average [num_weights].
        steps: Steps in it.
    """

    def __init__(self, flat: FlatParameters, decay: float) -> None:
        self._flat, self.decay = flat, decay
        self.values, self.steps = flat.weights.clone(), 0

    def restart(self) -> None:
        """Start again from the current weights."""
        self.values.copy_(self._flat.weights)
        self.steps = 0

    @torch.no_grad()
    def add(self) -> None:
        """Take the current weights into the average."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.values.lerp_(self._flat.weights, 1 - decay)

    def tensors(self, values: Tensor | None = None) -> dict[str, Tensor]:
        """Copy the average, or `values` in its place, and the number of steps to the CPU, by name."""
        flat, values = self._flat, (self.values if values is None else values).detach().cpu()
        state = {EMA_STEPS: torch.tensor(self.steps)}
        start = 0
        for name, tensor in zip(flat.names, flat.averaged(), strict=True):
            stop = start + tensor.numel()
            state[EMA + name] = values[start:stop].view(tensor.shape).clone()
            start = stop
        return state

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self.values.copy_(torch.cat([tensors[EMA + name].flatten() for name in self._flat.names]))
        self.steps = int(tensors[EMA_STEPS])


def split_average(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Divide a replica's saved tensors into its weights and the moving average of these, which may be empty.

    Of a moving average, only what it does not cover (counters) are the replica's own.
    """
    own = {name: tensor for name, tensor in weights.items() if not name.startswith(EMA)}
    averaged = {name: weights[EMA + name] for name in own if EMA + name in weights}
    return own, own | averaged if averaged else {}


def _averaged_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent float32 buffers, such as running statistics: replicas average them with the weights."""
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.dtype == torch.float32:
            yield name, buffer


def share(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """The part [start, stop) of `total` items that belongs to a rank: ceil(total / ranks) items, fewer at the end."""
    size = -(-total // ranks)
    return min(total, rank * size), min(total, (rank + 1) * size)
