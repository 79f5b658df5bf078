"""From counts to a back-off model, on sorted arrays: smoothing says how much probability seen n-grams give up.

Both methods interpolate: p(w | h) = (a(hw) - D) / total(h) + gamma(h) p(w | shorter h), and differ in counts and D.

- Modified Kneser-Ney (Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling",
  section 3): three discounts for each order, of counts 1, 2 and from 3 on, from the counts of counts. Below the highest
  order, a(g) is the number of different words before g, except that nothing but <s> precedes an n-gram at the beginning
  of a sentence: that one keeps its count.
- Witten-Bell (Witten and Bell 1991): no discount; as much is added to the total as there are different words after h.
  It has no counts of counts to estimate, so it serves where tokens are few and all of them frequent.

The result equals that of KenLM's `lmplz` (Heafield et al. 2013, "Scalable modified Kneser-Ney language model
estimation") up to rounding: unigrams are interpolated with a uniform distribution over all words but <s>, which gives
<unk> its probability; n-grams with few occurrences, or with words outside the vocabulary, are removed after discounting
and their probability goes to the shorter contexts; <s> has log10 p 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from speech.lm.arrays import load_array, make_array
from speech.lm.base import LmError
from speech.lm.counting import Keys, NgramCounts, keys_path
from speech.lm.ngram import NgramModel, NgramTables
from speech.lm.processes import in_processes
from speech.lm.vocabulary import SPECIAL, START_ID, Vocabulary

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


_SLICE = 1 << 22  # n-grams at a time: 32 MB for each array of 64-bit numbers
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class OrderCounts:
    """The n-grams of one order while they are estimated; all arrays are `[n-grams]`."""

    keys: Keys
    adjusted: NDArray[np.int64]
    suffixes: NDArray[np.int32]
    """Index of the n-gram without its first word, one order lower."""
    kept: Mask


def smoothed(
    words: Vocabulary,
    counts: Sequence[NgramCounts],
    method: Method,
    folder: Path,
    *,
    cutoffs: Sequence[int] = (),
    allowed: Mask | None = None,
    fallback: tuple[float, float, float] | None = None,
    workers: int = 1,
) -> tuple[NgramModel, list[Discounts]]:
    """Estimates a model and the discounts of its orders.

    Args:
        words: The vocabulary of the counts.
        counts: Those of all orders.
        method: Method of smoothing.
        folder: Scratch folder in which they were counted.
        cutoffs: For each order the highest count that is removed, not descending; the last one holds for all further
            orders.
        allowed: Words that the model shall have, `[words]`; the special ones need not be among them.
        fallback: Discounts where they cannot be estimated.
        workers: Number of processes.

    Raises:
        LmError: Discounts cannot be estimated.
    """
    width = len(words)
    levels = _levels(counts, width, method, folder, cutoffs, allowed, workers)
    by_order = [discounts(method, n, level.adjusted, fallback) for n, level in enumerate(levels, 1)]
    log_probs, backoffs = _interpolated(levels, by_order, width)
    kept_words = Vocabulary(words[int(at)] for at in np.flatnonzero(levels[0].kept))
    return NgramModel(kept_words, _tables(levels, log_probs, backoffs, width)), by_order


def _levels(
    counts: Sequence[NgramCounts],
    width: int,
    method: Method,
    folder: Path,
    cutoffs: Sequence[int],
    allowed: Mask | None,
    workers: int,
) -> list[OrderCounts]:
    suffixes = _suffixes(counts, width, folder, workers)
    kept = _kept(counts, width, cutoffs, allowed)
    levels = []
    first, last = START_ID, START_ID + 1
    for n, own in enumerate(counts, 1):
        if n > 1:
            first, last = (int(at) for at in own.keys.searchsorted([first * width, last * width]))
        adjusted = own.counts
        if method == "kneser-ney" and n < len(counts):
            adjusted = _continuations(suffixes[n], len(own.keys))
            adjusted[first:last] = own.counts[first:last]  # n-grams that begin with <s>
        levels.append(OrderCounts(own.keys, adjusted, suffixes[n - 1], kept[n - 1]))
    return levels


def _slices(count: int) -> Iterator[slice]:
    for first in range(0, count, _SLICE):
        yield slice(first, min(first + _SLICE, count))


def _suffixes(counts: Sequence[NgramCounts], width: int, folder: Path, workers: int) -> list[NDArray[np.int32]]:
    """For each order the indices of the n-grams without their first words, on disk."""
    assert all(len(of_order.keys) < 2**31 for of_order in counts), "more n-grams than 32 bits count"
    by_order: list[NDArray[np.int32]] = [np.zeros(width, dtype=np.int32)]
    for n, own in enumerate(counts[1:], 2):
        path = folder / f"suffixes-{n}.npy"
        make_array(path, np.int32, len(own.keys))
        pieces = ((folder, n, width, part) for part in _slices(len(own.keys)))
        for _ in in_processes(_write_suffixes, pieces, workers):
            pass
        by_order.append(load_array(path))
    return by_order


def _write_suffixes(folder: Path, order: int, width: int, part: slice) -> None:
    prefixes, last_words = np.divmod(load_array(keys_path(folder, order))[part], width)
    if order > 2:
        shorter = load_array(folder / f"suffixes-{order - 1}.npy")[prefixes].astype(np.int64) * width + last_words
        last_words = load_array(keys_path(folder, order - 1)).searchsorted(shorter)
    whole = np.load(folder / f"suffixes-{order}.npy", mmap_mode="r+", allow_pickle=False)
    whole[part] = last_words
    whole.flush()


def _continuations(suffixes: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Number of different words before each n-gram."""
    counts = np.zeros(count, dtype=np.int64)
    for part in _slices(len(suffixes)):
        counts += np.bincount(suffixes[part], minlength=count)
    return counts


def _kept(counts: Sequence[NgramCounts], width: int, cutoffs: Sequence[int], allowed: Mask | None) -> list[Mask]:
    """Which n-grams of each order stay in the model."""
    limits = [*cutoffs, *[cutoffs[-1] if cutoffs else 0] * len(counts)]
    words = np.ones(width, dtype=np.bool_) if allowed is None else allowed.copy()
    words &= counts[0].counts > limits[0]
    words[: len(SPECIAL)] = True
    kept = [words]
    for own, limit in zip(counts[1:], limits[1:], strict=False):
        mask = np.ones(len(own.keys), dtype=np.bool_)
        for part in _slices(len(own.keys)):
            prefixes, last_words = np.divmod(own.keys[part], width)
            mask[part] = (own.counts[part] > limit) & words[last_words] & kept[-1][prefixes]
        kept.append(mask)
    return kept


@dataclass(frozen=True)
class _Contexts:
    """Sums over the words after each context; both arrays are `[contexts]`."""

    totals: NDArray[np.float64]
    gammas: NDArray[np.float64]


def _contexts(level: OrderCounts, order: int, discount: Discounts, width: int, count: int) -> _Contexts:
    """What `count` contexts share out: their totals, and the share of shorter contexts (1 without any n-gram)."""
    totals, removed = np.zeros(count), np.zeros(count)
    types = np.zeros((4, count))  # kept n-grams with a count of 1, 2, more; all n-grams
    for part in _slices(len(level.keys)):
        prefixes = level.keys[part] // width if order > 1 else np.zeros(len(level.keys[part]), dtype=np.int64)
        adjusted, kept = level.adjusted[part], level.kept[part]
        totals += np.bincount(prefixes, adjusted, count)
        removed += np.bincount(prefixes, np.where(kept, 0, adjusted), count)
        for row, chosen in enumerate((adjusted == 1, adjusted == 2, adjusted > 2)):
            types[row] += np.bincount(prefixes[chosen & kept], minlength=count)
        types[3] += np.bincount(prefixes[adjusted > 0], minlength=count)
    free = removed + sum(amount * row for amount, row in zip(discount.amounts, types[:3], strict=True))
    if discount.adds_types:
        totals, free = totals + types[3], free + types[3]
    empty = totals == 0
    totals[empty] = 1
    return _Contexts(totals, np.where(empty, 1.0, free / totals))


def _interpolated(
    levels: Sequence[OrderCounts], by_order: Sequence[Discounts], width: int
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """log10 p of each order, and log10 of the back-off weights of each order but the highest, of kept n-grams."""
    lower = np.array([1 / (np.count_nonzero(levels[0].kept) - 1)])
    log_probs, backoffs = [], []
    for n, (level, own) in enumerate(zip(levels, by_order, strict=True), 1):
        contexts = _contexts(level, n, own, width, len(levels[n - 2].keys) if n > 1 else 1)
        if n > 1:
            backoffs.append(_log10(contexts.gammas[levels[n - 2].kept]))
        probs = np.empty(len(level.keys))
        for part in _slices(len(level.keys)):
            prefixes = level.keys[part] // width if n > 1 else 0
            adjusted = level.adjusted[part]
            own_share = (adjusted - own.of(adjusted)) / contexts.totals[prefixes]
            probs[part] = own_share + contexts.gammas[prefixes] * lower[level.suffixes[part]]
        if n == 1:
            probs[START_ID] = 1.0
        log_probs.append(np.minimum(_log10(probs[level.kept]), 0))
        lower = probs
    return log_probs, backoffs


def _log10(values: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.maximum(np.log10(values), -99.0).astype(np.float32)


def _tables(
    levels: Sequence[OrderCounts],
    log_probs: Sequence[NDArray[np.float32]],
    backoffs: Sequence[NDArray[np.float32]],
    width: int,
) -> NgramTables:
    """The arrays of the model: the kept n-grams of all orders, renumbered."""
    counts = [int(np.count_nonzero(level.kept)) for level in levels]
    new_width = counts[0]
    keys = np.empty(sum(counts), dtype=np.int64)
    links = np.zeros(sum(counts), dtype=np.int32)
    keys[:new_width] = np.arange(new_width)
    new_words = np.cumsum(levels[0].kept) - 1
    numbers, base, at = new_words, 1, new_width
    for level, lower_count in zip(levels[1:], counts, strict=False):
        for part in _slices(len(level.keys)):
            kept = level.kept[part]
            prefixes, last_words = np.divmod(level.keys[part][kept], width)
            to = slice(at, at + len(prefixes))
            keys[to] = (base + numbers[prefixes]) * new_width + new_words[last_words]
            links[to] = base + numbers[level.suffixes[part][kept]]
            at += len(prefixes)
        base += lower_count
        numbers = np.cumsum(level.kept) - 1
    if sum(counts) * new_width >= 2**63:
        raise LmError("the model has too many n-grams and words for 64-bit keys: limit lm.vocabulary")
    return NgramTables(tuple(counts), keys, np.concatenate(log_probs), _joined(backoffs), links)


def _joined(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
