"""One epoch's rows: which are trained, which are leased to whom, and in what order the rest is leased.

Pure state without clock or I/O: the same calls in the same order give the same state, so that the coordinator can
restore it from its event log after a kill.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.batching import derive_seed
from training.coordinator.messages import JsonObject
from training.coordinator.packing import Rows, pack_bits, pack_rows, unpack_bits, unpack_rows

MAX_NAMED = 1000
"""Repeated rows that are listed; further ones are only counted."""
POOL = 0
"""Owner of rows without a lease."""


def shard_order(seed: int, epoch: int, num_shards: int) -> Rows:
    """The order in which an epoch's shards are leased; identical on all machines."""
    rng = np.random.Generator(np.random.PCG64(derive_seed("leases", seed, epoch)))
    return rng.permutation(num_shards).astype(np.int64)


def _distinct(rows: Rows) -> Rows:
    """The rows in ascending order, each once: `np.unique` hashes, which takes five times as long."""
    ascending = np.sort(rows)
    return ascending[np.diff(ascending, prepend=-1) > 0]


class ShardMap:
    """Maps shards to rows of the index.

    Args:
        shard_of_row: Shard of each row [rows].
    """

    def __init__(self, shard_of_row: NDArray[np.integer[Any]]) -> None:
        self.shard_of_row = np.asarray(shard_of_row)
        self.count = int(self.shard_of_row.max()) + 1 if len(self.shard_of_row) else 0
        ascending = bool((self.shard_of_row[1:] >= self.shard_of_row[:-1]).all())
        # an index is usually sorted by shard, which saves keeping ten million numbers
        self._order = None if ascending else np.argsort(self.shard_of_row, kind="stable").astype(np.int64)
        sizes = np.bincount(self.shard_of_row, minlength=self.count)
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> "ShardMap":
        """Shards with these numbers of rows; the rows are numbered shard by shard."""
        return cls(np.repeat(np.arange(len(counts)), counts))

    def __len__(self) -> int:
        return len(self.shard_of_row)

    def rows(self, shard: int) -> Rows:
        """Rows of a shard, ascending."""
        start, stop = int(self._starts[shard]), int(self._starts[shard + 1])
        rows: Rows = np.arange(start, stop) if self._order is None else self._order[start:stop]
        return rows

    def split(self, rows: Rows) -> list[Rows]:
        """Split rows by shard, shards ascending."""
        ordered = rows[np.argsort(self.shard_of_row[rows], kind="stable")]
        edges = np.flatnonzero(np.diff(self.shard_of_row[ordered])) + 1
        return [part for part in np.split(ordered, edges) if len(part)]


@dataclass
class Totals:
    """Sums over training reports."""

    utterances: int = 0
    """Utterances, including repeated ones."""
    seconds: float = 0.0
    """Seconds of audio."""
    loss_sum: float = 0.0
    """Sum of the losses that were finite."""
    tokens: float = 0.0
    """Tokens that `loss_sum` covers."""
    unalignable: int = 0
    """Utterances with too few frames for their tokens."""
    skipped: int = 0
    """Utterances whose step was skipped because of a non-finite loss or gradient."""
    unreadable: int = 0
    """Utterances of damaged shards, left out."""
    steps: int = 0
    """Steps of all nodes."""

    def add(self, counts: JsonObject, sign: int = 1) -> None:
        """Add a report's counts, or subtract them (`sign` -1)."""
        for name, value in vars(self).items():
            setattr(self, name, value + sign * counts.get(name, 0))


@dataclass
class RowLease:
    """Rows that one incarnation of a node may train.

    Attributes:
        number: Increases with every lease, over all epochs.
        incarnation: The holder.
        rows: Ascending; for a whole epoch, rows that are already trained are included.
        whole: Whether a single node got everything that is left of the epoch.
        left: Number of rows that are neither trained nor returned.
        adopted: Whether the node took the rows itself during an outage.
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
        """Count rows, and list them up to `MAX_NAMED`."""
        self.count += len(rows)
        self.rows += rows[: max(0, MAX_NAMED - len(self.rows))].tolist()


@dataclass
class ClosedEpoch:
    """Summary of an epoch whose rows are all trained."""

    repeats: Repeats
    totals: Totals
    elapsed: float
    step: int

    def to_dict(self) -> JsonObject:
        """JSON representation."""
        return {**vars(self), "repeats": vars(self.repeats).copy(), "totals": vars(self.totals).copy()}

    @classmethod
    def from_dict(cls, value: JsonObject) -> "ClosedEpoch":
        """Inverse of `to_dict`."""
        repeats, totals = Repeats(**value["repeats"]), Totals(**value["totals"])
        return cls(repeats, totals, float(value["elapsed"]), int(value["step"]))


class Epoch:
    """The rows of an epoch in progress.

    Args:
        number: Number of the epoch; 0 is the first.
        shards: The index's shards.
        seed: The run's seed.
    """

    def __init__(self, number: int, shards: ShardMap, seed: int) -> None:
        self.number, self.shards = number, shards
        size = len(shards)
        self.trained = np.zeros(size, dtype=np.bool_)
        self.owner = np.zeros(size, dtype=np.int32)
        self.started = np.zeros(size, dtype=np.bool_)
        """Rows that their current owner has started."""
        self.risky = np.zeros(size, dtype=np.bool_)
        """Rows started by a node that was lost: another node that trains them may train them a second time."""
        self._free_rows: NDArray[np.int64] | None = None
        """Of each shard, how many are neither trained nor leased; counted when it is first asked for, and then kept."""
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
        """Number of pieces (mostly shards) with at least one row that is neither trained nor leased."""
        returned = sum(1 for rows in self.returned if len(self._free(rows)))
        if self._free_rows is None:
            free = self.shards.shard_of_row[~self.trained & (self.owner == POOL)]
            self._free_rows = np.bincount(free, minlength=self.shards.count)
        return returned + int((self._free_rows[self.order[self.position :]] > 0).sum())

    def _count_free(self, rows: Rows, change: int) -> None:
        """Count rows that are free now (1), or that were and are not any more (-1)."""
        if self._free_rows is not None:
            np.add.at(self._free_rows, self.shards.shard_of_row[rows], change)

    def _at(self, position: int) -> Rows:
        return self.shards.rows(int(self.order[position]))

    def _free(self, rows: Rows) -> Rows:
        free: Rows = rows[~self.trained[rows] & (self.owner[rows] == POOL)]
        return free

    def grant(self, number: int, incarnation: str, live: int) -> RowLease | None:
        """Lease pieces by guided self-scheduling: half an even share of what is left, so that all nodes end together.

        Args:
            number: Number of the new lease.
            incarnation: The holder.
            live: Nodes in the ring; a single node gets all.

        Returns:
            The lease, or None if nothing is left.
        """
        pieces = self.pool()
        if not pieces:
            return None
        wanted = pieces if live <= 1 else max(1, pieces // (2 * live))
        whole = live <= 1 and not self.leases
        taken: list[Rows] = []
        while len(taken) < wanted and self.returned:
            # returned rows may have been trained since, by a node that was dropped and came back
            if len(rows := self._free(self.returned.pop(0))):
                taken.append(rows)
        while len(taken) < wanted and self.position < len(self.order):
            rows = self._free(self._at(self.position))
            self.position += 1
            if len(rows):
                taken.append(rows)
        rows = _distinct(np.concatenate(taken))
        self._count_free(rows, -1)
        self.owner[rows] = number
        lease = RowLease(number, incarnation, np.arange(len(self)) if whole else rows, whole, len(rows))
        self.leases[number] = lease
        return lease

    def adopt(self, number: int, incarnation: str, rows: Rows) -> bool:
        """Lease rows that a node took itself during an outage; rows of other leases stay where they are."""
        rows = self._free(_distinct(rows))
        if not len(rows):
            return False
        self._count_free(rows, -1)
        self.owner[rows] = number
        self.leases[number] = RowLease(number, incarnation, rows, False, len(rows), adopted=True)
        return True

    def begin(self, incarnation: str, rows: Rows) -> None:
        """Mark rows of a node's leases as started, unless they are already trained."""
        mine = [lease.number for lease in self.leases.values() if lease.incarnation == incarnation]
        self.started[rows[np.isin(self.owner[rows], mine) & ~self.trained[rows]]] = True

    def train(self, rows: Rows) -> Rows:
        """Mark rows as trained, by any node; returns those that were not trained before."""
        rows = _distinct(rows)
        again = self.trained[rows]
        new = rows[~again]
        self.repeats.add(np.sort(np.concatenate([rows[again], new[self.risky[new]]])))
        self._count_free(new[self.owner[new] == POOL], -1)
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
        """Rows of a lease that are neither trained nor returned."""
        rows: Rows = lease.rows[~self.trained[lease.rows] & (self.owner[lease.rows] == lease.number)]
        return rows

    def give_back(self, number: int, rows: Rows) -> None:
        """Return rows of a lease that were not started to the pool."""
        lease = self.leases.get(number)
        rows = _distinct(rows)
        rows = rows[(self.owner[rows] == number) & ~self.trained[rows]]
        if lease is None or not len(rows):
            return
        self._release(rows)
        self.returned.append(rows)
        self._less(number, len(rows))

    def _release(self, rows: Rows) -> None:
        self._count_free(rows, 1)
        self.owner[rows] = POOL
        self.started[rows] = False

    def lose(self, incarnation: str) -> int:
        """Return the rows that a lost node has not reported to the pool; returns their number."""
        lost = 0
        for lease in [lease for lease in self.leases.values() if lease.incarnation == incarnation]:
            rows = self.open_rows(lease)
            started = rows[self.started[rows]]
            self.repeats.add(started[self.risky[started]])  # lost twice: the next training is the third
            self.risky[started] = True
            self._release(rows)
            self.returned += self.shards.split(rows)
            del self.leases[lease.number]
            lost += len(rows)
        return lost

    def held(self, incarnation: str) -> int:
        """Number of rows that a node holds and has not started."""
        rows = [self.open_rows(lease) for lease in self.leases.values() if lease.incarnation == incarnation]
        return sum(int((~self.started[part]).sum()) for part in rows)

    def to_dict(self) -> JsonObject:
        """JSON representation."""
        leases = [
            [x.number, x.incarnation, x.whole, x.adopted, pack_rows(self.open_rows(x))] for x in self.leases.values()
        ]
        return {
            "number": self.number,
            "trained": pack_bits(self.trained),
            "begun": pack_bits(self.started),
            "risky": pack_bits(self.risky),
            "leases": leases,
            "returned": [pack_rows(rows) for rows in self.returned],
            "position": self.position,
            "repeats": vars(self.repeats).copy(),
            "totals": vars(self.totals).copy(),
        }

    @classmethod
    def from_dict(cls, value: JsonObject, shards: ShardMap, seed: int) -> "Epoch":
        """Inverse of `to_dict`."""
        epoch = cls(int(value["number"]), shards, seed)
        size = len(shards)
        epoch.trained = unpack_bits(value["trained"], size)
        epoch.started = unpack_bits(value["begun"], size)
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
