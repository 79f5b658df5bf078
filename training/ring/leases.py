"""Leases of any data set: which rows a learner trains next."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from storage.batching import derive_seed
from training.coordinator.epochs import ShardMap
from training.coordinator.messages import NamedData
from training.coordinator.packing import Rows


class LeasedRows(NamedTuple):
    """Rows to train next.

    Attributes:
        epoch: Epoch (0 is the first).
        shard: Shard that holds them.
        rows: Rows [rows], numbered over the whole data set: shard s starts at `sum(counts[:s])`. In a node of several
            learners, this learner's part, which may be empty.
    """

    epoch: int
    shard: int
    rows: Rows


def named_data(counts: Sequence[int], epochs: int) -> NamedData:
    """Describe a data set to the coordinator.

    Raises:
        ValueError: If there are no rows, a shard is empty, or `epochs` is not positive.
    """
    sizes = [int(count) for count in counts]
    if not sizes or min(sizes) < 1:
        raise ValueError("counts must hold the number of rows of every shard, each at least 1")
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}: give at least 1")
    return NamedData(counts=tuple(sizes), epochs=epochs)


class PiecePlanner:
    """Cuts leases into pieces of nearly equal size, each of one shard, in shuffled order.

    Args:
        shards: The data set's shards.
        most: Maximum number of rows of a piece.
        seed: Seed of the order.
    """

    def __init__(self, shards: ShardMap, most: int, seed: int) -> None:
        self._shards, self._most, self._seed = shards, most, seed

    def __call__(self, epoch: int, rows: Rows, plan: str) -> list[Rows]:
        """Cut a lease's rows; the same rows in the same epoch give the same pieces."""
        rng = np.random.Generator(np.random.PCG64(derive_seed("pieces", self._seed, epoch, plan)))
        parts = self._shards.split(rows)
        pieces: list[Rows] = []
        for place in rng.permutation(len(parts)):
            part = parts[place]
            pieces += np.array_split(rng.permutation(part), math.ceil(len(part) / self._most))
        return pieces
