"""Clusters of Gaussian statistics, and the phonetic questions that clusters of phones make."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]
"""float64 `[N, 1 + 2 D]`: count, sums and sums of squares."""


def gaussian_log_likelihood(rows: Rows, floor: float) -> NDArray[np.float64]:
    """Log likelihood of frames under the diagonal Gaussian of their own moments.

    -n/2 (D log 2π + D + Σ log σ²), with variances of at least `floor`; 0 for no frames.

    Args:
        rows: `[N, 1 + 2 D]`.
        floor: Smallest variance.

    Returns:
        `[N]`.
    """
    dim = (rows.shape[1] - 1) // 2
    counts = rows[:, :1]
    moments = rows[:, 1:] / np.maximum(counts, 1e-10)
    variances = np.maximum(moments[:, dim:] - np.square(moments[:, :dim]), floor)
    # a floored variance keeps the frames' squared distance: Σ (x - μ)² / σ² is less than n
    spread = np.maximum(moments[:, dim:] - np.square(moments[:, :dim]), 0.0) / variances
    densities = dim * math.log(2 * math.pi) + (np.log(variances) + spread).sum(1)
    return np.where(counts[:, 0] > 0, -0.5 * counts[:, 0] * densities, 0.0)


def _losses(rows: Rows, one: int, others: NDArray[np.int64], floor: float, own: Rows) -> Rows:
    """What uniting a cluster with others costs in log-likelihood."""
    together = gaussian_log_likelihood(rows[one] + rows[others], floor)
    found: Rows = own[one] + own[others] - together
    return found


def dendrogram(rows: Rows, floor: float, threshold: float = math.inf) -> list[tuple[int, int]]:
    """Agglomerative clustering: pairs of clusters in the order of their union, cheapest first.

    Args:
        rows: `[N, 1 + 2 D]`, one row for each first cluster.
        floor: Smallest variance.
        threshold: Stop when the cheapest union costs as much.

    Returns:
        Pairs (kept, absorbed) of row numbers: the union goes on under the first's number.
    """
    rows = rows.copy()
    count = len(rows)
    own = gaussian_log_likelihood(rows, floor)
    losses = np.full((count, count), math.inf)
    for one in range(count - 1):
        others = np.arange(one + 1, count)
        losses[one, one + 1 :] = _losses(rows, one, others, floor, own)
    alive = np.ones(count, dtype=bool)
    unions = []
    while alive.sum() > 1:
        kept, absorbed = (int(i) for i in np.unravel_index(losses.argmin(), losses.shape))
        if losses[kept, absorbed] >= threshold:
            break
        unions.append((kept, absorbed))
        rows[kept] += rows[absorbed]
        own[kept] = gaussian_log_likelihood(rows[kept][None], floor)[0]
        alive[absorbed] = False
        losses[absorbed, :] = losses[:, absorbed] = math.inf
        others = np.flatnonzero(alive)
        others = others[others != kept]
        cost = _losses(rows, kept, others, floor, own)
        losses[np.minimum(kept, others), np.maximum(kept, others)] = cost
    return unions


def merge_clusters(rows: Rows, threshold: float, floor: float) -> list[int]:
    """Unite rows as long as a union costs less than a threshold: the cluster of each row, numbered from 0."""
    label = list(range(len(rows)))
    for kept, absorbed in dendrogram(rows, floor, threshold):
        label = [kept if one == absorbed else one for one in label]
    order = {one: number for number, one in enumerate(dict.fromkeys(label))}
    return [order[one] for one in label]


def phonetic_questions(phones: Sequence[int], tables: Sequence[Rows], floor: float = 0.01) -> list[tuple[int, ...]]:
    """Sets of phones that sound alike: every cluster on the way from single phones to all of them.

    Args:
        phones: Phone numbers.
        tables: Statistics of each phone `[N, 1 + 2 D]`, for instance one table for each state; each gives questions.
        floor: Smallest variance.

    Returns:
        Sets, sorted, each once.
    """
    questions: set[tuple[int, ...]] = {(phone,) for phone in phones}
    for rows in tables:
        members = {i: {phone} for i, phone in enumerate(phones)}
        for kept, absorbed in dendrogram(rows, floor):
            members[kept] = members[kept] | members.pop(absorbed)
            questions.add(tuple(sorted(members[kept])))
    return sorted(questions)
