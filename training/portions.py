"""Batches that a device's memory does not hold are computed in portions; gradients of these add up to the batch's.

The loss is a sum over utterances, so that nothing but dropout's draws depends on how a batch is divided.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from training.data import Batch
from training.devices import is_out_of_memory

log = logging.getLogger(__name__)

T = TypeVar("T")


class TooLargeError(RuntimeError):
    """Something that cannot be divided does not fit into the device's memory."""


@contextmanager
def undivided(what: str, remedy: str) -> Iterator[None]:
    """Needs its memory as a whole.

    Args:
        what: It is.
        remedy: What a user can do.

    Raises:
        TooLargeError: The memory does not hold it.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TooLargeError(f"the GPU's memory does not hold {what} ({error}): {remedy}") from error


class Portions:
    """How much of a batch fits at a time; learnt from what did not."""

    def __init__(self) -> None:
        self._too_much = math.inf
        """The fewest values of padded input that did not fit."""

    def first(self, batch: Batch) -> int:
        """Utterances of a batch to begin with: all, unless as much has failed before."""
        size, each = len(batch.ids), batch.inputs.numel() / max(1, len(batch.ids))
        while size > 1 and size * each >= self._too_much:
            size = math.ceil(size / 2)
        return size

    def smaller(self, batch: Batch, size: int) -> int:
        """So many utterances of a batch did not fit: how many to try next.

        Raises:
            TooLargeError: It was a single one.
        """
        if size == 1:
            raise TooLargeError(
                f"an utterance of this batch does not fit into the GPU's memory by itself ({_longest(batch)}): leave "
                "such out by data.max_seconds, or use a smaller model, fewer learners a GPU or one with more memory"
            )
        self._too_much = min(self._too_much, batch.inputs.numel() / len(batch.ids) * size)
        smaller = math.ceil(size / 2)
        log.warning(
            "the GPU's memory does not hold %d utterances of a batch at a time: trying %d (train.batch_seconds)",
            *(size, smaller),
        )
        return smaller

    def each(self, batch: Batch, compute: Callable[[Batch], T]) -> Iterator[tuple[Batch, T]]:
        """Compute something for a batch, in as many portions as memory demands.

        Returns:
            The portions in the batch's order, with what was computed for each.

        Raises:
            TooLargeError: A single utterance does not fit.
        """
        start, size = 0, self.first(batch)
        while start < len(batch.ids):
            part = batch.part(slice(start, start + size))
            try:
                found = compute(part)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            else:
                yield part, found
                start += size
                continue
            # after the handler: the error's traceback holds on to what was computed
            size = self.smaller(batch, len(part.ids))


def _longest(batch: Batch) -> str:
    """The longest utterance of a batch."""
    return batch.ids[int(batch.lengths.argmax())]


def cut(batch: Batch, size: int) -> Iterator[slice]:
    """A batch's utterances, so many at a time."""
    return (slice(start, start + size) for start in range(0, len(batch.ids), size))
