"""A model's parameters in one contiguous buffer, its gradients in another: averaging is one pass over memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from speech.models.networks.precision import bf16_parameters

GAP = 65_536
"""Most weights in float32 that are converted in vain, rather than convert those before and after them separately."""


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


@dataclass
class _Part:
    """A range [start, stop) of the flat parameters that is converted at once."""

    start: int
    stop: int
    sizes: list[int] = field(default_factory=list)
    """Of its parameters, and of the gaps between them."""
    shapes: list[torch.Size | None] = field(default_factory=list)
    """None for a gap."""


class _Converted(torch.autograd.Function):
    """A part of the weights in bf16. Backward adds the gradients to the flat ones in one pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, flat: FlatParameters, part: _Part) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.flat, ctx.part = flat, part
        pieces = flat.weights[part.start : part.stop].bfloat16().split_with_sizes(part.sizes)
        # without a view where a piece has the shape: the host needs time for views, too
        return tuple(
            piece.view(shape) if len(shape) > 1 else piece
            for piece, shape in zip(pieces, part.shapes, strict=True)
            if shape is not None
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        part, given = ctx.part, iter(grads)
        found = [None if shape is None else next(given) for shape in part.shapes]
        missing = {size for size, grad in zip(part.sizes, found, strict=True) if grad is None}
        zeros = ctx.flat.grads.new_zeros(max(missing, default=0), dtype=torch.bfloat16)
        nothing = {size: zeros[:size] for size in missing}
        pieces = [
            nothing[size] if grad is None else grad.flatten() for size, grad in zip(part.sizes, found, strict=True)
        ]
        ctx.flat.grads[part.start : part.stop].add_(torch.cat(pieces))
        return None, None, None


class Bf16Weights:
    """Converts a model's weights to bf16 all at once, instead of one by one as autocast does.

    Scores and gradients are those of autocast, bit for bit: autocast, too, converts a weight once in a pass, and sums
    the gradients of its uses in bf16. Only a model that itself computes with the weights of its linear layers and
    convolutions, a norm of them for example, would do so in bf16 rather than fp32. Gradients are added at the end of
    the backward pass, where no hook of a parameter is called; until then, they and their bf16 copy take four bytes a
    weight.

    Args:
        flat: The model's parameters.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._anchor = torch.zeros((), device=flat.weights.device, requires_grad=True)
        places = _places(flat)
        numbers = [number for number, parameter in enumerate(flat.parameters) if parameter in places]
        self._places = [(places[flat.parameters[number]], flat.parameters[number]) for number in numbers]
        self._parts = _parts(flat, numbers)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context for a forward pass under autocast; the backward pass may follow outside."""
        weights = [
            weight
            for part in self._parts
            for weight in _Converted.apply(self._anchor, self._flat, part)  # type: ignore[no-untyped-call]
        ]
        try:
            for (places, _), weight in zip(self._places, weights, strict=True):
                for owner, name in places:
                    owner[name] = weight
            yield
        finally:
            for places, parameter in self._places:
                for owner, name in places:
                    owner[name] = parameter


Place = tuple[dict[str, Any], str]
"""A module's parameters, and a name among them."""


def _places(flat: FlatParameters) -> dict[Tensor, list[Place]]:
    """Where modules keep the trainable parameters which all of them use in bf16 only."""
    found: dict[Tensor, list[Place]] = {parameter: [] for parameter in flat.parameters}
    for module in flat.model.modules():
        converted = set(bf16_parameters(module, flat.weights.device))
        for name, parameter in module._parameters.items():
            if parameter in found and name in converted:
                found[parameter].append((module._parameters, name))
            elif parameter is not None:
                found.pop(parameter, None)
    return found


def _parts(flat: FlatParameters, numbers: list[int]) -> list[_Part]:
    """The ranges to convert for the parameters of these numbers: few, since they include small gaps."""
    parts: list[_Part] = []
    for number in numbers:
        start, stop = flat.spans[number]
        if not parts or start - parts[-1].stop > GAP:
            parts.append(_Part(start, start))
        part = parts[-1]
        if start > part.stop:
            part.sizes.append(start - part.stop)
            part.shapes.append(None)
        part.sizes.append(stop - start)
        part.shapes.append(flat.parameters[number].shape)
        part.stop = stop
    return parts


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
