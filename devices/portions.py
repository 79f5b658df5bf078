"""Computes batches that do not fit into a device's memory in portions, whose gradients add up to the batch's.

The loss is a sum over utterances, so only dropout's draws depend on how a batch is divided.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from torch import Tensor

from devices.choice import is_out_of_memory

log = logging.getLogger(__name__)

T = TypeVar("T")


class Divisible(Protocol):
    """A batch that can be computed in portions."""

    ids: list[str]
    inputs: Tensor
    lengths: Tensor

    def part(self: "B", which: slice) -> "B":
        """Some of its utterances."""


B = TypeVar("B", bound=Divisible)


class TooLargeError(RuntimeError):
    """Data that cannot be divided does not fit into the device's memory."""


@contextmanager
def undivided(what: str, remedy: str) -> Iterator[None]:
    """Context for allocations that cannot be divided: turns out-of-memory errors into `TooLargeError`.

    Args:
        what: What is allocated, for the error.
        remedy: What a user can do, for the error.

    Raises:
        TooLargeError: If the device is out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TooLargeError(f"the GPU's memory does not hold {what} ({error}): {remedy}") from error


class Portions:
    """Chooses how much of a batch to compute at a time, from earlier failures."""

    def __init__(self) -> None:
        self._too_much = math.inf
        """Smallest number of padded input values that did not fit."""

    def first(self, batch: Divisible) -> int:
        """Utterances of a batch to start with: all, unless an input of that size has failed before."""
        size, each = len(batch.ids), batch.inputs.numel() / max(1, len(batch.ids))
        while size > 1 and size * each >= self._too_much:
            size = math.ceil(size / 2)
        return size

    def smaller(self, batch: Divisible, size: int) -> int:
        """Number of utterances to try after `size` of them did not fit.

        Raises:
            TooLargeError: If `size` is 1.
        """
        if size == 1:
            raise TooLargeError(
                f"an utterance of this batch does not fit into the GPU's memory by itself ({_longest(batch)}): exclude "
                "such utterances with data.max_seconds, or use a smaller model, fewer learners per GPU, or a larger GPU"
            )
        self._too_much = min(self._too_much, batch.inputs.numel() / len(batch.ids) * size)
        smaller = math.ceil(size / 2)
        log.warning(
            "the GPU's memory does not hold %d utterances of a batch at a time: trying %d (train.batch_seconds)",
            *(size, smaller),
        )
        return smaller

    def each(self, batch: B, compute: Callable[[B], T]) -> Iterator[tuple[B, T]]:
        """Apply a function to a batch, in as many portions as memory requires.

        Yields:
            The portions in the batch's order, with the result for each.

        Raises:
            TooLargeError: If a single utterance does not fit.
        """
        start, size = 0, self.first(batch)
        while start < len(batch.ids):
            part = batch.part(slice(start, start + size))
            try:
                result = compute(part)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            else:
                yield part, result
                start += size
                continue
            # outside the handler: the error's traceback keeps tensors alive
            size = self.smaller(batch, len(part.ids))


def _longest(batch: Divisible) -> str:
    """Id of the longest utterance of a batch."""
    return batch.ids[int(batch.lengths.argmax())]


def cut(batch: Divisible, size: int) -> Iterator[slice]:
    """Slices of a batch, `size` utterances each."""
    return (slice(start, start + size) for start in range(0, len(batch.ids), size))
