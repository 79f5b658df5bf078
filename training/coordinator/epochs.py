"""One epoch's rows: which are trained, which are leased to whom, and in what order the rest is given out.

Pure state, no clock and no input or output: the same calls in the same order give the same state, which is how the
coordinator finds its state again after it was killed.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.coordinator.messages import Message, Rows, pack_bits, pack_rows, unpack_bits, unpack_rows
from training.learner.batching import derive_seed

MAX_NAMED = 1000
"""Repeated rows that are named; beyond that they are counted only."""
POOL = 0
"""Owner of rows that nobody has."""


def shard_order(seed: int, epoch: int, num_shards: int) -> Rows:
    """The order in which an epoch's shards are given out, the same on every machine."""
    rng = np.random.Generator(np.random.PCG64(derive_seed("leases", seed, epoch)))
    return rng.permutation(num_shards).astype(np.int64)


class ShardMap:
    """Which rows of the index each shard has.

    Args:
        shard_of_row: Each row's shard [rows].
    """

    def __init__(self, shard_of_row: NDArray[np.integer[Any]]) -> None:
        self.shard_of_row = np.asarray(shard_of_row)
        self.count = int(self.shard_of_row.max()) + 1 if len(self.shard_of_row) else 0
        ascending = bool((self.shard_of_row[1:] >= self.shard_of_row[:-1]).all())
        # as a rule an index is in the order of its shards, and ten million numbers need not be kept
        self._order = None if ascending else np.argsort(self.shard_of_row, kind="stable").astype(np.int64)
        sizes = np.bincount(self.shard_of_row, minlength=self.count)
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.shard_of_row)

    def rows(self, shard: int) -> Rows:
        """A shard's rows, ascending."""
        start, stop = int(self._starts[shard]), int(self._starts[shard + 1])
        rows: Rows = np.arange(start, stop) if self._order is None else self._order[start:stop]
        return rows

    def some(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which shards have a row that a mask of all rows marks [count]."""
        ordered = mask if self._order is None else mask[self._order]
        before = np.concatenate([[0], np.cumsum(ordered, dtype=np.int32)])
        found: NDArray[np.bool_] = np.diff(before[self._starts]) > 0
        return found

    def split(self, rows: Rows) -> list[Rows]:
        """Rows by shard, ascending."""
        ordered = rows[np.argsort(self.shard_of_row[rows], kind="stable")]
        edges = np.flatnonzero(np.diff(self.shard_of_row[ordered])) + 1
        return [part for part in np.split(ordered, edges) if len(part)]


@dataclass
class Totals:
    """Sums over training reports."""

    utterances: int = 0
    """Utterances, repeated ones included."""
    seconds: float = 0.0
    """Audio."""
    loss_sum: float = 0.0
    """Sum of the losses that were finite."""
    tokens: float = 0.0
    """Tokens that `loss_sum` is over."""
    unalignable: int = 0
    """Utterances whose tokens do not fit their frames."""
    skipped: int = 0
    """Utterances whose step was not made because loss or gradient was not finite."""
    unreadable: int = 0
    """Utterances of damaged shards, left out."""
    steps: int = 0
    """Steps, over all nodes."""

    def add(self, counts: Message, sign: int = 1) -> None:
        """Add, or take away, a report's counts."""
        for name, value in vars(self).items():
            setattr(self, name, value + sign * counts.get(name, 0))


@dataclass
class RowLease:
    """Rows that one incarnation of a node may train.

    Attributes:
        number: Grows with every lease, over all epochs.
        incarnation: Whose.
        rows: Ascending; of a whole epoch, those that are trained already included.
        whole: Whether it is everything that is left of an epoch, for a node alone.
        left: Rows that are neither trained nor given back.
        adopted: Whether the node took it by itself.
    """

    number: int
    incarnation: str
    rows: Rows
    whole: bool
    left: int
    adopted: bool = False


@dataclass
class Repeats:
    """Rows that were, or may have been, trained more than once in an epoch."""

    count: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        """Count and name rows."""
        self.count += len(rows)
        self.rows += rows[: max(0, MAX_NAMED - len(self.rows))].tolist()


@dataclass
class ClosedEpoch:
    """What is left of an epoch of which every row is trained."""

    repeats: Repeats
    totals: Totals
    elapsed: float
    step: int

    def to_dict(self) -> Message:
        """As JSON."""
        return {**vars(self), "repeats": vars(self.repeats).copy(), "totals": vars(self.totals).copy()}

    @classmethod
    def from_dict(cls, value: Message) -> "ClosedEpoch":
        """From what `to_dict` gave."""
        repeats, totals = Repeats(**value["repeats"]), Totals(**value["totals"])
        return cls(repeats, totals, float(value["elapsed"]), int(value["step"]))


class Epoch:
    """The rows of an epoch that is under way.

    Args:
        number: 0 is the first.
        shards: The index's shards.
        seed: The run's.
    """

    def __init__(self, number: int, shards: ShardMap, seed: int) -> None:
        self.number, self.shards = number, shards
        size = len(shards)
        self.trained = np.zeros(size, dtype=np.bool_)
        self.owner = np.zeros(size, dtype=np.int32)
        self.begun = np.zeros(size, dtype=np.bool_)
        """By its present owner."""
        self.risky = np.zeros(size, dtype=np.bool_)
        """Begun by somebody who was lost: trained twice when somebody else trains it."""
        self.leases: dict[int, RowLease] = {}
        self.returned: list[Rows] = []
        self.position = 0
        self.count = 0
        self.repeats = Repeats()
        self.totals = Totals()
        self.order = shard_order(seed, number, shards.count)

    def __len__(self) -> int:
        return len(self.trained)

    @property
    def done(self) -> bool:
        """Whether every row is trained."""
        return self.count == len(self)

    def pool(self) -> int:
        """Pieces, most of them shards, of which nobody has some row."""
        returned = sum(1 for rows in self.returned if len(self._free(rows)))
        free = self.shards.some(~self.trained & (self.owner == POOL))
        return returned + int(free[self.order[self.position :]].sum())

    def _at(self, position: int) -> Rows:
        return self.shards.rows(int(self.order[position]))

    def _free(self, rows: Rows) -> Rows:
        free: Rows = rows[~self.trained[rows] & (self.owner[rows] == POOL)]
        return free

    def grant(self, number: int, incarnation: str, live: int) -> RowLease | None:
        """Lease pieces by guided self-scheduling: half of an even share of what is left, so that all end together.

        Args:
            number: Of the new lease.
            incarnation: Whose.
            live: Nodes in the ring; one alone gets all.

        Returns:
            The lease, or None if there is nothing left.
        """
        pieces = self.pool()
        if not pieces:
            return None
        wanted = pieces if live <= 1 else max(1, pieces // (2 * live))
        whole = live <= 1 and not self.leases
        taken: list[Rows] = []
        while len(taken) < wanted and self.returned:
            # what was returned may have been trained since, by a node that was dropped and is back
            if len(rows := self._free(self.returned.pop(0))):
                taken.append(rows)
        while len(taken) < wanted and self.position < len(self.order):
            rows = self._free(self._at(self.position))
            self.position += 1
            if len(rows):
                taken.append(rows)
        rows = np.unique(np.concatenate(taken))
        self.owner[rows] = number
        lease = RowLease(number, incarnation, np.arange(len(self)) if whole else rows, whole, len(rows))
        self.leases[number] = lease
        return lease

    def adopt(self, number: int, incarnation: str, rows: Rows) -> bool:
        """Lease rows that a node took by itself while it had no answer; those of others stay theirs."""
        rows = self._free(np.unique(rows))
        if not len(rows):
            return False
        self.owner[rows] = number
        self.leases[number] = RowLease(number, incarnation, rows, False, len(rows), adopted=True)
        return True

    def begin(self, incarnation: str, rows: Rows) -> None:
        """Note that a node has begun rows of its leases, unless they are trained already."""
        mine = [lease.number for lease in self.leases.values() if lease.incarnation == incarnation]
        self.begun[rows[np.isin(self.owner[rows], mine) & ~self.trained[rows]]] = True

    def train(self, rows: Rows) -> Rows:
        """Note that rows were trained, by whomever; returns those that were not before."""
        rows = np.unique(rows)
        again = self.trained[rows]
        new = rows[~again]
        self.repeats.add(np.sort(np.concatenate([rows[again], new[self.risky[new]]])))
        self.trained[new] = True
        self.count += len(new)
        for owner, number in zip(*np.unique(self.owner[new], return_counts=True), strict=True):
            self._less(int(owner), int(number))
        return new

    def _less(self, owner: int, number: int) -> None:
        lease = self.leases.get(owner)
        if lease is None:
            return
        lease.left -= number
        if not lease.left:
            del self.leases[owner]

    def open_rows(self, lease: RowLease) -> Rows:
        """A lease's rows that are neither trained nor given back."""
        rows: Rows = lease.rows[~self.trained[lease.rows] & (self.owner[lease.rows] == lease.number)]
        return rows

    def give_back(self, number: int, rows: Rows) -> None:
        """Put rows of a lease that nobody has begun back into the pool."""
        lease = self.leases.get(number)
        rows = np.unique(rows)
        rows = rows[(self.owner[rows] == number) & ~self.trained[rows]]
        if lease is None or not len(rows):
            return
        self._release(rows)
        self.returned.append(rows)
        self._less(number, len(rows))

    def _release(self, rows: Rows) -> None:
        self.owner[rows] = POOL
        self.begun[rows] = False

    def lose(self, incarnation: str) -> int:
        """Put what a lost node has not reported back into the pool; returns how many rows that is."""
        lost = 0
        for lease in [lease for lease in self.leases.values() if lease.incarnation == incarnation]:
            rows = self.open_rows(lease)
            begun = rows[self.begun[rows]]
            self.repeats.add(begun[self.risky[begun]])  # lost twice: the one who trains it makes it three
            self.risky[begun] = True
            self._release(rows)
            self.returned += self.shards.split(rows)
            del self.leases[lease.number]
            lost += len(rows)
        return lost

    def held(self, incarnation: str) -> int:
        """Rows that a node has and has not begun."""
        rows = [self.open_rows(lease) for lease in self.leases.values() if lease.incarnation == incarnation]
        return sum(int((~self.begun[part]).sum()) for part in rows)

    def to_dict(self) -> Message:
        """As JSON."""
        leases = [
            [x.number, x.incarnation, x.whole, x.adopted, pack_rows(self.open_rows(x))] for x in self.leases.values()
        ]
        return {
            "number": self.number,
            "trained": pack_bits(self.trained),
            "begun": pack_bits(self.begun),
            "risky": pack_bits(self.risky),
            "leases": leases,
            "returned": [pack_rows(rows) for rows in self.returned],
            "position": self.position,
            "repeats": vars(self.repeats).copy(),
            "totals": vars(self.totals).copy(),
        }

    @classmethod
    def from_dict(cls, value: Message, shards: ShardMap, seed: int) -> "Epoch":
        """From what `to_dict` gave."""
        epoch = cls(int(value["number"]), shards, seed)
        size = len(shards)
        epoch.trained = unpack_bits(value["trained"], size)
        epoch.begun = unpack_bits(value["begun"], size)
        epoch.risky = unpack_bits(value["risky"], size)
        for number, incarnation, whole, adopted, packed in value["leases"]:
            rows = unpack_rows(packed)
            epoch.owner[rows] = number
            every = np.arange(size) if whole else rows
            epoch.leases[number] = RowLease(number, incarnation, every, whole, len(rows), adopted)
        epoch.returned = [unpack_rows(packed) for packed in value["returned"]]
        epoch.position = int(value["position"])
        epoch.count = int(epoch.trained.sum())
        epoch.repeats = Repeats(**value["repeats"])
        epoch.totals = Totals(**value["totals"])
        return epoch
