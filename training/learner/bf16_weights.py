"""A model's weights in bf16, all converted at once: autocast converts each weight, and each gradient, by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from devices.precision import bf16_parameters
from training.learner.flat import FlatParameters

GAP = 65_536
"""Longest run of weights that stay in float32 but are converted, too, so that those around them are one range."""


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
        all_grads = [None if shape is None else next(given) for shape in part.shapes]
        missing = {size for size, grad in zip(part.sizes, all_grads, strict=True) if grad is None}
        zeros = ctx.flat.grads.new_zeros(max(missing, default=0), dtype=torch.bfloat16)
        nothing = {size: zeros[:size] for size in missing}
        pieces = [
            nothing[size] if grad is None else grad.flatten() for size, grad in zip(part.sizes, all_grads, strict=True)
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
    places: dict[Tensor, list[Place]] = {parameter: [] for parameter in flat.parameters}
    for module in flat.model.modules():
        converted = set(bf16_parameters(module, flat.weights.device))
        for name, parameter in module._parameters.items():
            if parameter in places and name in converted:
                places[parameter].append((module._parameters, name))
            elif parameter is not None:
                places.pop(parameter, None)
    return places


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
