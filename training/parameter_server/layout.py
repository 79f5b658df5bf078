"""Layout of the shares: which part of a model each server process holds."""

import math
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from training.learner.flat import FlatParameters, share
from training.learner.optim import Rate, Rates, parameter_groups

ALIGNMENT = 64
"""A parameter is split only at multiples of this many values. An optimizer's kernel processes the values after the last
full SIMD vector with other instructions, whose result may differ in the last bit. With aligned splits, each value is
processed as in a single process."""
SCALARS = frozenset({"step"})
"""Optimizer state that is a single number per parameter."""


class ParameterSlice(BaseModel):
    """The part of one parameter that lies in a share.

    Attributes:
        number: Number of the parameter in the whole model, as in `training.learner.optim.optimizer_tensors`.
        first: Index of the first value within the flattened parameter.
        stop: Index after the last value.
        shape: Shape of the whole parameter.
        scale: Factor of its learning rate.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    first: int
    stop: int
    shape: tuple[int, ...]
    scale: float = 1.0

    @property
    def numel(self) -> int:
        """Number of values of the whole parameter."""
        return math.prod(self.shape)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the piece: one row for pieces of matrices, so that weight decay treats them as matrices."""
        size = self.stop - self.first
        return (1, size) if len(self.shape) > 1 else (size,)


class Layout(BaseModel):
    """One share of a model's flat weights.

    Attributes:
        number: Number of the server process, from 0.
        servers: Number of server processes.
        start: Index of the share's first weight.
        stop: Index after its last weight.
        num_weights: Number of weights of the whole model, averaged buffers included; these come last and have no
            gradient.
        num_grads: Number of weights of the share that have a gradient; these come first.
        pieces: Pieces of parameters, in order and without gaps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    servers: int
    start: int
    stop: int
    num_weights: int
    num_grads: int
    pieces: tuple[ParameterSlice, ...]

    @property
    def size(self) -> int:
        """Number of weights in the share."""
        return self.stop - self.start


def layout(flat: FlatParameters, number: int, servers: int, rates: Rates = MappingProxyType({})) -> Layout:
    """Compute the share of one server; shares are contiguous and of about equal size.

    Args:
        flat: The whole model.
        number: Number of the server, from 0.
        servers: Number of servers.
        rates: Learning rates that differ from the schedule's.
    """
    total = flat.weights.numel()
    start, stop = (_aligned(flat, edge) for edge in share(total, number, servers))
    numbers = _optimizer_numbers(flat, rates)
    pieces = []
    for index, (begin, end) in enumerate(flat.spans):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            parameter = flat.parameters[index]
            pieces.append(
                ParameterSlice(
                    number=numbers[index],
                    first=first - begin,
                    stop=last - begin,
                    shape=tuple(parameter.shape),
                    scale=rates.get(parameter, Rate()).scale,
                )
            )
    grads = sum(piece.stop - piece.first for piece in pieces)
    return Layout(
        number=number,
        servers=servers,
        start=start,
        stop=stop,
        num_weights=total,
        num_grads=grads,
        pieces=tuple(pieces),
    )


def _aligned(flat: FlatParameters, edge: int) -> int:
    """Round an edge between two shares down to where a parameter may be split."""
    for begin, end in flat.spans:
        if begin <= edge < end:
            return begin + (edge - begin) // ALIGNMENT * ALIGNMENT
    return edge


def _optimizer_numbers(flat: FlatParameters, rates: Rates) -> dict[int, int]:
    """Position of each parameter in the optimizer (`training.learner.optim.build_optimizer`)."""
    groups = parameter_groups(flat.parameters, rates)
    order = [index for numbers in groups.values() for index in numbers]
    return {index: number for number, index in enumerate(order)}
