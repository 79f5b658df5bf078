"""Counts of n-grams, in parallel and out of core.

The n-grams of each order are sorted by their keys, `index of the prefix among the (n-1)-grams × number of words + last
word`: 64 bits are enough for any order. Each block of text gives a sorted run of keys with counts, on disk. Runs are
merged by ranges of keys, so that a process holds one range at a time. Sentences begin with one <s>.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speech.lm.arrays import load_array, make_array, save_array
from speech.lm.encoding import EncodedText, load_block
from speech.lm.processes import in_processes
from speech.lm.vocabulary import START_ID

_RANGE = 8_000_000
"""Entries of a range of keys, all runs together: 128 MB of keys and counts, and as much again while they are sorted."""
Keys = NDArray[np.int64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class NgramCounts:
    """The n-grams of one order that occur in a text; the arrays may lie on disk."""

    keys: Keys
    """`[n-grams]`, ascending and different."""
    counts: Counts
    """`[n-grams]`, how often each occurs."""


def count_ngrams(text: EncodedText, order: int, folder: Path, workers: int = 1) -> list[NgramCounts]:
    """Counts the n-grams of all orders up to `order`.

    The unigrams are all words of the vocabulary, those that never occur (<unk>, and <s>, which nothing predicts) with
    count 0.

    Args:
        text: Its blocks are read once for each order.
        folder: Scratch folder, where the arrays of the result stay.
        workers: Number of processes.
    """
    width = len(text.words)
    by_order = [_unigrams(text, workers)]
    for n in range(2, order + 1):
        pieces = (
            (block, n, [keys_path(folder, lower) for lower in range(2, n)], width, folder / f"run-{n}-{at:05}")
            for at, block in enumerate(text.blocks)
        )
        runs = list(in_processes(_count_block, pieces, workers))
        by_order.append(_merge(runs, n, folder, workers))
    return by_order


def _unigrams(text: EncodedText, workers: int) -> NgramCounts:
    width = len(text.words)
    counts = sum(in_processes(_count_words, ((block, width) for block in text.blocks), workers))
    assert isinstance(counts, np.ndarray)
    counts[START_ID] = 0
    return NgramCounts(np.arange(width), counts)


def _count_words(block: Path, width: int) -> Counts:
    return np.bincount(load_block(block), minlength=width)


def _count_block(block: Path, order: int, lower: Sequence[Path], width: int, run: Path) -> Path:
    """Writes the keys of a block's n-grams, sorted, and their counts."""
    keys = np.sort(ngram_keys(load_block(block), order, [load_array(path) for path in lower], width))
    _save_run(run, *run_lengths(keys, np.ones(len(keys), dtype=np.int64)))
    return run


def ngram_keys(ids: NDArray[np.int32], order: int, lower: Sequence[Keys], width: int) -> Keys:
    """Keys of all n-grams of an order in a text, `[n-grams]`.

    Args:
        ids: The text, `[tokens]`; sentences begin with <s>.
        order: At least 2.
        lower: Keys of the orders 2 to `order` - 1.
        width: Number of words.
    """
    starts = ids == START_ID
    # An n-gram ends at token t where no sentence starts in t - n + 2 … t.
    inside = ~starts[order - 1 :]
    for back in range(1, order - 1):
        inside &= ~starts[order - 1 - back : -back]
    ends = np.flatnonzero(inside) + order - 1
    prefixes = ids[ends - order + 1].astype(np.int64)
    for back, keys in zip(range(order - 2, 0, -1), lower, strict=True):
        prefixes = keys.searchsorted(prefixes * width + ids[ends - back])
    return prefixes * width + ids[ends]


def run_lengths(keys: Keys, counts: Counts) -> tuple[Keys, Counts]:
    """Different keys of a sorted array, and the sums of their counts."""
    if not len(keys):
        return keys, counts
    firsts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[firsts], np.add.reduceat(counts, firsts)


def _merge(runs: Sequence[Path], order: int, folder: Path, workers: int) -> NgramCounts:
    """Merges sorted runs into one, a range of keys at a time."""
    bounds = _ranges(runs)
    pieces = ((runs, low, high, folder / f"part-{order}-{at:05}") for at, (low, high) in enumerate(pairwise(bounds)))
    parts = list(in_processes(_merge_range, pieces, workers))
    for run in runs:
        _remove_run(run)
    keys = _concatenate([_run_path(part, "keys") for part in parts], keys_path(folder, order))
    counts = _concatenate([_run_path(part, "counts") for part in parts], folder / f"counts-{order}.npy")
    return NgramCounts(keys, counts)


def _ranges(runs: Sequence[Path]) -> list[int]:
    """Bounds of ranges with some `_RANGE` entries of all runs together."""
    keys = [load_array(_run_path(run, "keys")) for run in runs]
    total = sum(len(of_run) for of_run in keys)
    step = 1 + total // 100_000
    sample = np.sort(np.concatenate([of_run[::step] for of_run in keys]))
    count = 1 + total // _RANGE
    inner = [int(sample[len(sample) * at // count]) for at in range(1, count)]
    return [0, *inner, np.iinfo(np.int64).max]


def _merge_range(runs: Sequence[Path], low: int, high: int, part: Path) -> Path:
    pieces = []
    for run in runs:
        keys = load_array(_run_path(run, "keys"))
        first, last = keys.searchsorted([low, high])
        pieces.append((keys[first:last], load_array(_run_path(run, "counts"))[first:last]))
    keys = np.concatenate([of_run for of_run, _ in pieces])
    counts = np.concatenate([of_run for _, of_run in pieces])
    order = np.argsort(keys, kind="stable")  # merges what is sorted in pieces
    _save_run(part, *run_lengths(keys[order], counts[order]))
    return part


def _concatenate(parts: Sequence[Path], path: Path) -> NDArray[np.int64]:
    arrays = [load_array(part) for part in parts]
    whole = make_array(path, np.int64, sum(len(array) for array in arrays))
    at = 0
    for part, array in zip(parts, arrays, strict=True):
        whole[at : at + len(array)] = array
        at += len(array)
        part.unlink()
    whole.flush()
    return load_array(path)


def _save_run(run: Path, keys: Keys, counts: Counts) -> None:
    save_array(_run_path(run, "keys"), keys)
    save_array(_run_path(run, "counts"), counts)


def _remove_run(run: Path) -> None:
    for part in ("keys", "counts"):
        _run_path(run, part).unlink()


def _run_path(run: Path, part: str) -> Path:
    return run.with_name(f"{run.name}.{part}.npy")


def keys_path(folder: Path, order: int) -> Path:
    """Where the keys of an order lie."""
    return folder / f"keys-{order}.npy"
