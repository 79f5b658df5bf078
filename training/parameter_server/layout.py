"""Which part of a model a server process holds."""

import math

from pydantic import BaseModel, ConfigDict

from training.learner.flat import FlatParameters, share

ALIGNMENT = 64
"""A parameter is cut after a multiple of this many values. An optimizer's kernel treats the values behind the last full
vector with other instructions, whose last bit may differ: cut so, each value is treated as in one process."""
SCALARS = frozenset({"step"})
"""Optimizer state that is one number for a whole parameter."""


class Piece(BaseModel):
    """The part of one parameter that lies in a share.

    Attributes:
        number: Of the parameter, as `training.learner.optim.optimizer_tensors` counts for the whole model.
        first: Its first value, counted within the flattened parameter.
        stop: Behind its last value.
        shape: Of the whole parameter.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    first: int
    stop: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Values of the whole parameter."""
        return math.prod(self.shape)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of the piece: a matrix of one row for what is no vector, so that weight decay treats it as the whole."""
        size = self.stop - self.first
        return (1, size) if len(self.shape) > 1 else (size,)


class Layout(BaseModel):
    """One share of a model's flat weights.

    Attributes:
        number: Of the server process.
        servers: How many there are.
        start: The share's first weight.
        stop: Behind its last weight.
        num_weights: Of the whole model, averaged buffers included; they come last and have no gradient.
        num_grads: Weights of the share that have a gradient, which come first.
        pieces: Of parameters, in order and without gaps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    servers: int
    start: int
    stop: int
    num_weights: int
    num_grads: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Weights of the share."""
        return self.stop - self.start


def layout(flat: FlatParameters, number: int, servers: int) -> Layout:
    """The share of one of several servers: contiguous, all of them about equal.

    Args:
        flat: The whole model.
        number: Of the server, from 0.
        servers: How many there are.
    """
    total = flat.weights.numel()
    start, stop = (_aligned(flat, edge) for edge in share(total, number, servers))
    numbers = _optimizer_numbers(flat)
    pieces = []
    for index, (begin, end) in enumerate(flat.spans):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            shape = tuple(flat.parameters[index].shape)
            pieces.append(Piece(number=numbers[index], first=first - begin, stop=last - begin, shape=shape))
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
    """An edge between two shares, moved back to where a parameter may be cut."""
    for begin, end in flat.spans:
        if begin <= edge < end:
            return begin + (edge - begin) // ALIGNMENT * ALIGNMENT
    return edge


def _optimizer_numbers(flat: FlatParameters) -> dict[int, int]:
    """Position of each parameter in the optimizer: matrices first (`training.learner.optim.build_optimizer`)."""
    order = sorted(range(len(flat.parameters)), key=lambda index: flat.parameters[index].ndim <= 1)
    return {index: number for number, index in enumerate(order)}
