"""Deterministic division of utterances into sets or folds, with disjoint speakers and stratification.

Utterances belong to groups (speakers, or one group per utterance), groups to strata. The set of a group depends on the
seed, the hashes of its name and of its stratum, and the sizes of the groups before it in its stratum. So a new speaker
moves few other speakers, and none of another stratum.
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
"""Number of quantiles into which a numeric column is divided."""


class SplitError(ValueError):
    """The utterances cannot be divided as configured."""


def name_order(names: Iterable[str], seed: int) -> Ints:
    """Positions of names, sorted by the hash of seed and name."""
    data = bytearray()
    for name in names:
        data += hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    keys = np.frombuffer(data, dtype=">u8").reshape(-1, 2)
    return np.lexsort((keys[:, 1], keys[:, 0])).astype(np.int64)


def share_of_name(name: str, seed: int) -> float:
    """A number in [0, 1) that depends only on seed and name."""
    digest = hashlib.sha256(f"{seed}/stratum/{name}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def bin_numbers(values: Floats) -> Ints:
    """Quantile of each value: 0 to 3."""
    edges = np.quantile(values, np.arange(1, _BINS) / _BINS) if len(values) else np.zeros(0)
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def group_strata(groups: Ints, strata: Ints, num_groups: int) -> Ints:
    """Stratum of each group: the most frequent one of its utterances, the lowest if tied.

    Args:
        groups: Group of each utterance.
        strata: Stratum of each utterance.
        num_groups: Number of groups.
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
    """Groups of utterances in the order in which they are assigned, stratum by stratum.

    Args:
        sizes: Number of utterances of each group.
        order: Groups sorted by the hash of their names, from `name_order`.
        strata: Stratum of each group; None: a single stratum.
        strata_names: Names of the strata, which determine how their shares are rounded.
        unnamed: Whether the utterances are to be divided by speaker, and name none.
    """

    def __init__(
        self,
        sizes: Ints,
        order: Ints,
        strata: Ints | None = None,
        strata_names: Sequence[str] = ("",),
        unnamed: bool = False,
    ) -> None:
        self.sizes, self.names, self.unnamed = sizes, strata_names, unnamed
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
        """Check that there are enough groups.

        Raises:
            SplitError: If there are fewer groups than sets.
        """
        if len(self.sizes) < needed:
            what = "utterances of unknown speakers" if self.unnamed else f"{len(self.sizes)} speaker(s) or utterance(s)"
            raise SplitError(
                f"{what} cannot be divided into {sets}: name the sets in "
                "data.sources.*.set, or use data.split_by: utterance (speakers then appear in several sets)"
            )

    def filled(self, result: Ints, sets: int) -> Ints:
        """Fill empty sets: move a group of the largest set to each set without a group."""
        for wanted in range(sets):
            counts = np.bincount(result, minlength=sets)
            if counts[wanted] == 0:
                rows = self.order[result[self.order] == int(counts.argmax())]
                result[rows[0]] = wanted
        return result


def split_groups(groups: Groups, shares: Mapping[str, float], seed: int) -> Ints:
    """Assign each group to a set: its position in `["train", *shares]`; the remaining groups are assigned to train.

    A set takes groups until it has its share of the utterances. With strata, a share that is not a whole number of
    groups is rounded up or down by a hash, so that the sum over many strata is right. Without them, each set has at
    least one group, and one with more than half of the utterances is for training.

    Args:
        groups: The groups.
        shares: Share of the utterances by set name; without zeros.
        seed: Seed of the division.

    Raises:
        SplitError: If there are fewer groups than sets.
    """
    groups.check(len(shares) + 1, ", ".join([TRAIN, *shares]))
    result = np.zeros(len(groups.sizes), dtype=np.int64)
    for name, members in groups.by_stratum():
        if groups.plain:  # a set that takes its first group in any case must not take nearly everything
            members = members[np.argsort(2 * groups.sizes[members] > groups.sizes.sum(), kind="stable")]
        sizes = groups.sizes[members]
        ends = np.cumsum(sizes)
        total, position = int(ends[-1]), 0
        for number, (wanted, share) in enumerate(shares.items(), start=1):
            part = 0.5 if groups.plain else share_of_name(f"{name}/{wanted}", seed)
            before = ends[position - 1] if position else 0
            # a group is taken if the share covers the fraction of it given by the hash, or half of it without strata
            points = ends[position:] - before - sizes[position:] * (1 - part)
            taken = int(np.searchsorted(points, share * total, side="right"))
            if groups.plain:  # at least one group for every set, including train
                taken = min(max(taken, 1), len(members) - position - (len(shares) - number + 1))
            result[members[position : position + taken]] = number
            position += taken
    return groups.filled(result, len(shares) + 1)


def fold_groups(groups: Groups, folds: int, seed: int) -> Ints:
    """Assign each group to a fold, from 0; folds have about the same number of utterances.

    Raises:
        SplitError: If there are fewer groups than folds.
    """
    groups.check(folds, f"{folds} folds")
    result = np.zeros(len(groups.sizes), dtype=np.int64)
    for name, members in groups.by_stratum():
        sizes = groups.sizes[members]
        middles = np.cumsum(sizes) - sizes / 2
        turn = 0.0 if groups.plain else share_of_name(name, seed)  # small strata start with different folds
        result[members] = np.floor((middles / sizes.sum() + turn) * folds).astype(np.int64) % folds
    return groups.filled(result, folds)


def encode(values: Iterable[Any]) -> tuple[Ints, list[str]]:
    """Encode values as positions in their sorted names, so that codes do not depend on the order of the rows.

    Returns:
        The codes, and the names.
    """
    seen: dict[str, int] = {}
    codes = np.fromiter((seen.setdefault(str(value), len(seen)) for value in values), dtype=np.int64)
    names = sorted(seen)
    places = np.empty(len(names), dtype=np.int64)
    for place, name in enumerate(names):
        places[seen[name]] = place
    return (places[codes] if len(codes) else codes), names
