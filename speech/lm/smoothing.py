"""Smoothing: how much probability seen n-grams give up for unseen ones.

Both methods interpolate: p(w | h) = (a(hw) - D) / total(h) + gamma(h) p(w | shorter h), and differ in counts and D.

- Modified Kneser-Ney (Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling",
  section 3): three discounts for each order, of counts 1, 2 and from 3 on, from the counts of counts. Below the highest
  order, a(g) is the number of different words before g, except that nothing but <s> precedes an n-gram at the beginning
  of a sentence: that one keeps its count.
- Witten-Bell (Witten and Bell 1991): no discount; as much is added to the total as there are different words after h.
  It has no counts of counts to estimate, so it serves where tokens are few and all of them frequent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from speech.lm.base import LmError

Method = Literal["kneser-ney", "witten-bell"]
_REMEDY = (
    "so Kneser-Ney's discounts cannot be estimated: take more text without repeated lines, a lower order, "
    "lm.smoothing: witten-bell (for few and frequent tokens), or set lm.discount_fallback: [0.5, 1.0, 1.5]"
)


@dataclass(frozen=True)
class Discounts:
    """What an order's n-grams give up."""

    amounts: tuple[float, float, float]
    """Subtracted from counts of 1, of 2, and of 3 and more."""
    adds_types: bool = False
    """Whether the number of different words after a context is added to its total."""

    def of(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The discount of each count; none of a count of 0."""
        return np.array((0.0, *self.amounts))[np.minimum(counts, 3)]


def discounts(
    method: Method, order: int, counts: NDArray[np.int64], fallback: tuple[float, float, float] | None
) -> Discounts:
    """Estimates the discounts of one order.

    Args:
        method: Method of smoothing.
        order: The order, for errors.
        counts: Adjusted counts of its n-grams; those of 0 are left out.
        fallback: Discounts where no estimate is possible.

    Raises:
        LmError: No estimate is possible, and there is no fallback.
    """
    if method == "witten-bell":
        return Discounts((0.0, 0.0, 0.0), adds_types=True)
    counts_of_counts = np.bincount(counts[counts < 5], minlength=5).tolist()
    problem = ""
    amounts: list[float] = []
    if missing := [count for count in (1, 2, 3) if not counts_of_counts[count]]:
        problem = f"no {order}-gram has an adjusted count of {missing[0]}, {_REMEDY}"
    else:
        amounts = estimated_discounts(counts_of_counts)
        for count, amount in enumerate(amounts, 1):
            if not 0 <= amount <= count:
                problem = f"the discount of {order}-grams with adjusted count {count} would be {amount:.3g}, {_REMEDY}"
    if not problem:
        return Discounts((amounts[0], amounts[1], amounts[2]))
    if fallback is None:
        raise LmError(f"lm.smoothing kneser-ney: {problem}")
    return Discounts(fallback)


def estimated_discounts(counts_of_counts: Sequence[int]) -> list[float]:
    """D1, D2 and D3+ (Chen and Goodman 1999, equation 26) from n_0 to n_4; n_1 to n_3 are not 0."""
    n = counts_of_counts
    share = n[1] / (n[1] + 2 * n[2])
    return [count - (count + 1) * share * n[count + 1] / n[count] for count in (1, 2, 3)]
