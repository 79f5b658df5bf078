"""A model's parameters in one contiguous buffer, its gradients in another: averaging is one pass over memory."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class FlatParameters:
    """Moves a model's float32 parameters, followed by its averaged buffers, into one contiguous tensor.

    Parameters and buffers become views of it: writing to `weights` changes the model. Gradients are views of `grads`,
    which covers the trainable parameters only. Frozen parameters are not moved.

    Args:
        model: The model, already on its device; its parameters' storage is replaced.

    Attributes:
        weights: Parameters, then buffers [num_weights], float32.
        grads: Gradients of the parameters [num_parameters], in the same order.

    Raises:
        ValueError: If a trainable parameter is not float32; mixed precision keeps float32 weights here.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        wrong = next((n for n, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32), None)
        if wrong is not None:
            raise ValueError(f"parameter {wrong} is not float32: keep weights in float32 and use autocast (train.amp)")
        self._buffers = list(_averaged_buffers(model))
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


def _averaged_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Persistent float32 buffers, such as running statistics: replicas average them with the weights."""
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.dtype == torch.float32:
            yield buffer


def share(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """The part [start, stop) of `total` items that belongs to a rank: ceil(total / ranks) items, fewer at the end."""
    size = -(-total // ranks)
    return min(total, rank * size), min(total, (rank + 1) * size)
