"""Dividing utterances into sets or folds: speakers kept apart, strata represented, the same division every time.

Utterances belong to groups (speakers, or each to its own), groups to strata. Where a group goes depends on the seed,
the hashes of its name and of its stratum, and the sizes of the groups before it in its stratum: so another speaker
moves few others, and none of another stratum.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
TRAIN = "train"
_BINS = 4
"""Quantiles that a column of numbers is divided into."""


class SplitError(ValueError):
    """The utterances cannot be divided as asked."""


def name_order(names: Iterable[str], seed: int) -> Ints:
    """Positions of names in the order of the hashes of seed and name."""
    data = bytearray()
    for name in names:
        data += hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    keys = np.frombuffer(data, dtype=">u8").reshape(-1, 2)
    return np.lexsort((keys[:, 1], keys[:, 0])).astype(np.int64)


def share_of_name(name: str, seed: int) -> float:
    """A number in [0, 1) that depends on seed and name only."""
    digest = hashlib.sha256(f"{seed}/stratum/{name}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def bin_numbers(values: Floats) -> Ints:
    """Quantile that each value lies in: 0 to 3."""
    edges = np.quantile(values, np.arange(1, _BINS) / _BINS) if len(values) else np.zeros(0)
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def group_strata(groups: Ints, strata: Ints, num_groups: int) -> Ints:
    """Stratum of each group: that of most of its utterances, the lowest where two have as many.

    Args:
        groups: Group of each utterance.
        strata: Stratum of each utterance.
        num_groups: How many groups there are.
    """
    width = int(strata.max(initial=0)) + 1
    pairs, counts = np.unique(groups * width + strata, return_counts=True)
    order = np.lexsort((pairs, -counts, pairs // width))
    first = np.ones(len(order), dtype=bool)
    owners = pairs[order] // width
    first[1:] = owners[1:] != owners[:-1]
    result = np.zeros(num_groups, dtype=np.int64)
    result[owners[first]] = pairs[order][first] % width
    return result


class Groups:
    """Groups of utterances in the order in which they are given away, stratum by stratum.

    Args:
        sizes: Utterances of each group.
        order: Groups by the hash of their names, from `name_order`.
        strata: Stratum of each group; None is one stratum.
        strata_names: Names of the strata, which decide how their shares are rounded.
    """

    def __init__(
        self, sizes: Ints, order: Ints, strata: Ints | None = None, strata_names: Sequence[str] = ("",)
    ) -> None:
        self.sizes, self.names = sizes, strata_names
        self.plain = strata is None
        strata = np.zeros(len(sizes), dtype=np.int64) if strata is None else strata
        self.order = order[np.argsort(strata[order], kind="stable")]
        self.ends = np.cumsum(np.bincount(strata, minlength=len(strata_names)))

    def by_stratum(self) -> Iterator[tuple[str, Ints]]:
        """Name and groups of each stratum."""
        begin = 0
        for name, end in zip(self.names, self.ends, strict=True):
            if end > begin:
                yield name, self.order[begin:end]
            begin = end

    def check(self, needed: int, sets: str) -> None:
        """Refuse to divide too few groups.

        Raises:
            SplitError: If there are fewer groups than sets.
        """
        if len(self.sizes) < needed:
            raise SplitError(
                f"{len(self.sizes)} speaker(s) or utterance(s) cannot be divided into {sets}: name the sets in "
                "data.sources.*.set, or use data.split_by: utterance (speakers then appear in several sets)"
            )

    def filled(self, result: Ints, sets: int) -> Ints:
        """The division, with a group of the fullest set for each set that has none."""
        for wanted in range(sets):
            counts = np.bincount(result, minlength=sets)
            if counts[wanted] == 0:
                rows = self.order[result[self.order] == int(counts.argmax())]
                result[rows[0]] = wanted
        return result


def split_groups(groups: Groups, shares: Mapping[str, float], seed: int) -> Ints:
    """Give each group a set: position in `["train", *shares]`; what no share claims goes to train.

    A set takes groups until it has its share of the utterances. Over strata, a share that is no whole number of
    groups is rounded up or down by a hash, so that the sum over many strata comes out right.

    Args:
        groups: The groups.
        shares: Set name to share of the utterances; none of zero.
        seed: Chooses among divisions.

    Raises:
        SplitError: If there are fewer groups than sets.
    """
    groups.check(len(shares) + 1, ", ".join([TRAIN, *shares]))
    result = np.zeros(len(groups.sizes), dtype=np.int64)
    for name, members in groups.by_stratum():
        sizes = groups.sizes[members]
        ends = np.cumsum(sizes)
        total, position = int(ends[-1]), 0
        for number, (wanted, share) in enumerate(shares.items(), start=1):
            part = 0.5 if groups.plain else share_of_name(f"{name}/{wanted}", seed)
            before = ends[position - 1] if position else 0
            # a group is taken if the share reaches the part of it that the hash names: its middle without strata
            points = ends[position:] - before - sizes[position:] * (1 - part)
            taken = int(np.searchsorted(points, share * total, side="right"))
            if groups.plain:  # every set, and train, gets one group at least
                taken = min(max(taken, 1), len(members) - position - (len(shares) - number + 1))
            result[members[position : position + taken]] = number
            position += taken
    return groups.filled(result, len(shares) + 1)


def fold_groups(groups: Groups, folds: int, seed: int) -> Ints:
    """Give each group a fold, from 0, of about equally many utterances.

    Raises:
        SplitError: If there are fewer groups than folds.
    """
    groups.check(folds, f"{folds} folds")
    result = np.zeros(len(groups.sizes), dtype=np.int64)
    for name, members in groups.by_stratum():
        sizes = groups.sizes[members]
        middles = np.cumsum(sizes) - sizes / 2
        turn = 0.0 if groups.plain else share_of_name(name, seed)  # small strata begin with different folds
        result[members] = np.floor((middles / sizes.sum() + turn) * folds).astype(np.int64) % folds
    return groups.filled(result, folds)


def encode(values: Iterable[Any]) -> tuple[Ints, list[str]]:
    """Codes of values in the order of their names, and the names: independent of the order of the rows."""
    seen: dict[str, int] = {}
    codes = np.fromiter((seen.setdefault(str(value), len(seen)) for value in values), dtype=np.int64)
    names = sorted(seen)
    places = np.empty(len(names), dtype=np.int64)
    for place, name in enumerate(names):
        places[seen[name]] = place
    return (places[codes] if len(codes) else codes), names
