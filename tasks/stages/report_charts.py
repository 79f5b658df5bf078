"""Histograms of a report: durations of utterances, and words per second."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.index import ShardIndex
from storage.objects import ObjectStore

_BINS = 30


@dataclass(frozen=True)
class Histogram:
    """Counts of a quantity in equal bins from 0."""

    title: str
    unit: str
    counts: list[int]
    end: float
    """Upper end of the last bin; larger values are counted in it."""
    median: float

    @property
    def bars(self) -> list[tuple[float, float, str]]:
        """For each bin its position and height as shares of the plot, and a text."""
        width, most = self.end / len(self.counts), max(1, *self.counts)
        return [
            (number / len(self.counts), count / most, f"{number * width:.2g} – {(number + 1) * width:.2g}: {count:,}")
            for number, count in enumerate(self.counts)
        ]


def histogram(title: str, unit: str, values: Sequence[float] | NDArray[np.float64]) -> Histogram:
    """Count values; the bins end at the 99.5 % quantile, so that single outliers do not compress the rest.

    Args:
        title: What is counted.
        unit: Unit of the values.
        values: Non-negative values; at least one.
    """
    array = np.asarray(values, dtype=np.float64)
    end = float(np.quantile(array, 0.995)) or 1.0
    counts, _ = np.histogram(np.minimum(array, end), bins=_BINS, range=(0.0, end))
    return Histogram(title, unit, counts.tolist(), end, float(np.median(array)))


def set_histograms(store: ObjectStore, name: str) -> list[Histogram]:
    """Histograms of one set: durations, and words per second; empty if the set is.

    Args:
        store: Store of the set's shards.
        name: The set.
    """
    index = ShardIndex.read(store)
    if not len(index):
        return []
    seconds: list[float] = []
    rates: list[float] = []
    for batch in index.batches(["duration", "text"]):
        for duration, text in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            seconds.append(duration)
            rates.append(len(text.split()) / max(duration, 1e-3))
    return [
        histogram(f"{name}: duration", "s", seconds),
        histogram(f"{name}: speaking rate", "words/s", rates),
    ]
