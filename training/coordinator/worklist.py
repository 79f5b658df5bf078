"""A node's batches: those of its leases, oldest epoch first, and its own share during an outage.

Pure state; `NodeClient` protects it with a lock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.batching import derive_seed
from training.coordinator.epochs import ShardMap, shard_order
from training.coordinator.messages import CoordinatorError, Lease
from training.coordinator.packing import Rows, pack_rows, unpack_rows

Planner = Callable[[int, Rows, str], Sequence[Rows]]
"""(epoch, rows ascending, plan) -> batches. `plan` is "whole" for all rows of an epoch, else a name that depends only
on the epoch and its rows."""
Arrived = Callable[[Sequence["Assignment"]], None]
"""Called with the batches of a new lease."""
WHOLE = "whole"
OWN = "own-"
"""Prefix of the lease name of rows that the node took itself during an outage."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """A batch to train.

    Attributes:
        lease: Name of its lease.
        epoch: Epoch (0 is the first).
        number: Position in the lease's plan.
        rows: Positions in the training set's index.
    """

    lease: str
    epoch: int
    number: int
    rows: Rows

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the batch."""
        return self.lease, self.number

    @property
    def own(self) -> bool:
        """Whether the node took it itself, because the coordinator did not answer."""
        return self.lease.startswith(OWN)


def plan_lease(planner: Planner, lease: Lease, size: int) -> list[Assignment]:
    """Plan the batches of a lease.

    A lease of a whole epoch is planned over all rows of the epoch, and batches that are already trained are left out.
    So a resumed training has the same batches as an uninterrupted one. If other nodes have trained parts of batches,
    the rest is replanned.

    Args:
        planner: Cuts rows into batches.
        lease: The lease, as the coordinator sent it.
        size: Utterances per epoch.

    Raises:
        CoordinatorError: If the plan does not cover the lease's rows.
    """
    epoch, rows = lease.epoch, unpack_rows(lease.rows)
    batches = list(planner(epoch, np.arange(size), WHOLE)) if lease.whole else []
    if batches:
        open_rows = np.zeros(size, dtype=np.bool_)
        open_rows[rows] = True
        shares = [open_rows[batch].mean() for batch in batches]
        if all(share in (0.0, 1.0) for share in shares):
            batches = [batch for batch, share in zip(batches, shares, strict=True) if share]
        else:
            batches = []
    if not batches:
        batches = list(planner(epoch, rows, plan_name(epoch, rows)))
    if sum(map(len, batches)) != len(rows):
        raise CoordinatorError(f"a plan covers {sum(map(len, batches))} of a lease's {len(rows)} rows")
    return [Assignment(lease.id, epoch, number, rows) for number, rows in enumerate(batches)]


def plan_name(epoch: int, rows: Rows) -> str:
    """Name of a plan; depends only on the epoch and its rows, not on the node."""
    return f"{derive_seed('plan', epoch, pack_rows(rows)):016x}"


class Worklist:
    """The queue of a node's batches.

    Args:
        shards: The index's shards.
        seed: The run's seed.
        total: Number of epochs to train.
        trained: Mask of the rows that were trained when the node joined, by epoch.
    """

    def __init__(self, shards: ShardMap, seed: int, total: int, trained: dict[int, NDArray[np.bool_]]) -> None:
        self.shards, self.seed, self.total = shards, seed, total
        self._queue: list[Assignment] = []
        self._known = {epoch: mask.copy() for epoch, mask in trained.items()}
        """Mask by epoch of the rows that were trained, or that are or were leased to this node."""
        self._seen: list[str] = []
        self._own = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def seen(self) -> list[str]:
        """Names of the latest leases that have arrived."""
        return self._seen[-256:]

    def knows(self, lease: str) -> bool:
        """Whether a lease has arrived before."""
        return lease in self._seen

    def add(self, assignments: list[Assignment]) -> None:
        """Insert a lease's batches after those of its epoch and of older epochs."""
        if not assignments:
            return
        epoch = assignments[0].epoch
        place = sum(1 for waiting in self._queue if waiting.epoch <= epoch)
        self._queue[place:place] = assignments
        if not assignments[0].own:
            self._seen.append(assignments[0].lease)
        for assignment in assignments:
            self._mask(epoch)[assignment.rows] = True

    def _mask(self, epoch: int) -> NDArray[np.bool_]:
        if epoch not in self._known:
            self._known[epoch] = np.zeros(len(self.shards), dtype=np.bool_)
        return self._known[epoch]

    def next(self) -> Assignment | None:
        """Take the next batch; None if there is none."""
        return self._queue.pop(0) if self._queue else None

    def peek(self, count: int) -> list[Assignment]:
        """The next batches, without removing them."""
        return self._queue[:count]

    def give_back(self, epoch: int, utterances: int) -> list[Assignment]:
        """Remove about that many utterances of an epoch, in whole batches from the end."""
        given: list[Assignment] = []
        count = 0
        for assignment in reversed([waiting for waiting in self._queue if waiting.epoch == epoch and not waiting.own]):
            if count + len(assignment.rows) / 2 > utterances:
                break
            given.append(assignment)
            count += len(assignment.rows)
        self._remove(given)
        return given

    def drop_own(self) -> None:
        """Drop batches that this node took itself and has not started: the coordinator is back and leases them."""
        self._remove([waiting for waiting in self._queue if waiting.own])

    def _remove(self, assignments: list[Assignment]) -> None:
        gone = {id(assignment) for assignment in assignments}
        self._queue = [waiting for waiting in self._queue if id(waiting) not in gone]
        for assignment in assignments:
            self._mask(assignment.epoch)[assignment.rows] = False

    def own_share(self, closed: int, pools: dict[int, int], place: int, nodes: int) -> tuple[int, Rows] | None:
        """The rows that a node may train during an outage: every n-th of the shards that were free when it started.

        Args:
            closed: Number of closed epochs.
            pools: By epoch, how many shards of its order were leased.
            place: This node's position in the ring.
            nodes: Number of nodes in the ring.

        Returns:
            Epoch and rows, or None if no rows are left.
        """
        for epoch in range(closed, min(closed + 2, self.total)):
            order = shard_order(self.seed, epoch, self.shards.count)
            places = [p for p in range(pools.get(epoch, 0), len(order)) if p % nodes == place]
            known = self._mask(epoch)
            parts = [rows[~known[rows]] for rows in (self.shards.rows(int(order[p])) for p in places)]
            rows = np.sort(np.concatenate([*parts, np.zeros(0, dtype=np.int64)]))
            if len(rows):
                return epoch, rows
        return None

    def take_own(self, planner: Planner, epoch: int, rows: Rows) -> list[Assignment]:
        """Plan the batches of an own share; `add` puts them into the queue."""
        self._own += 1
        whole = len(rows) == len(self.shards)
        lease = Lease(id=f"{OWN}{self._own}", epoch=epoch, whole=whole, rows=pack_rows(rows))
        return plan_lease(planner, lease, len(self.shards))
