"""A node's connection to the coordinator: a thread sends a heartbeat every `beat_s`, so that training never waits.

During an outage the node continues with the leases that it has, then with its share of the unleased rows. It reports
these when the coordinator is back.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.coordinator.epochs import ShardMap
from training.coordinator.membership import View
from training.coordinator.messages import CoordinatorError, JoinReply, Progress, checkpoint_folder
from training.coordinator.session import COORDINATOR_LOST, CoordinatorSession
from training.coordinator.worklist import Arrived, Assignment, Planner, Worklist

__all__ = ["COORDINATOR_LOST", "Assignment", "JoinReply", "NodeClient", "Planner", "Progress", "checkpoint_folder"]


class NodeClient(CoordinatorSession):
    """Rank 0's connection to the coordinator. Only `join`, `rejoin`, `fail`, `leave` and `close` may block.

        client = NodeClient("host:port", key, node=0, folder=folder)
        reply = client.join(endpoints)        # job, source of the weights; heartbeats start
        ...                                   # build the model, get weights
        client.begin(planner, shard_of_row)   # from now on it gets leases, and newcomers may take its weights
        while not client.finish():
            if client.dropped(): reply = client.rejoin(endpoints); ...; client.begin(planner, shard_of_row)
            if (epoch := client.snapshot_wanted()) is not None: ...; client.snapshot_written(epoch)
            if (number := client.checkpoint_wanted()) is not None: ...; client.checkpoint_done(number, record)
            assignment = client.next()        # None: nothing now, ask again soon
            ...
            client.trained(assignment, loss_sum=..., tokens=..., seconds=..., utterances=...)
        client.leave(); client.close()

    Args:
        address: HOST:PORT of the coordinator.
        key: The ring's key; None for a coordinator on this machine that runs without a key.
        node: Number of the node.
        folder: The node's folder, for journal lines that are not yet acknowledged.
    """

    def begin(self, planner: Planner, shard_of_row: NDArray[np.integer[Any]], arrived: Arrived | None = None) -> None:
        """Announce that this node has weights and wants leases.

        Args:
            planner: Cuts leases into batches; called from the client's thread.
            shard_of_row: Shard of each row of an epoch [rows].
            arrived: Called from the client's thread with the batches of a new lease, before `next` returns any of them.

        Raises:
            CoordinatorError: If this node's index differs from the coordinator's.
        """
        if len(shard_of_row) != self._progress.size:
            raise CoordinatorError(
                f"this node's index has {len(shard_of_row)} utterances, the coordinator's {self._progress.size}: "
                "is train_url the same?"
            )
        with self._lock:
            self._planner, self._arrived = planner, arrived
            shards = ShardMap(shard_of_row)
            self._work = Worklist(shards, self._seed, self._progress.total, self._trained_before)
            self._ready, self._kept = True, self._incarnation
        self._wake.set()

    # --- work

    def next(self) -> Assignment | None:
        """Take the next batch to train; None if there is none at the moment.

        Raises:
            CoordinatorError: If this node cannot continue: its planner failed, or the coordinator refused a request.
        """
        with self._lock:
            if self._error:
                raise CoordinatorError(self._error)
            first = self.peek(1)
            if self._work is None or not first or self._dropped:
                self._idle, self._last_step = True, None
                return None
            key = (first[0].lease, first[0].number)
            # during an outage, batches are started without announcing them to the coordinator first
            self._idle, self._urgent = False, key not in self._safe and not self._alone
            if self._urgent:
                self._wake.set()
                return None
            self._in_hand[key] = first[0]
            return self._work.next()

    def peek(self, count: int) -> list[Assignment]:
        """The next batches, for prefetching; the coordinator may still lease them to another node."""
        with self._lock:
            return self._work.peek(count) if self._work is not None else []

    def trained(
        self,
        assignment: Assignment,
        *,
        loss_sum: float,
        tokens: float,
        seconds: float,
        utterances: int,
        unalignable: int = 0,
        skipped: int = 0,
        unreadable: int = 0,
    ) -> None:
        """Report a trained batch, which is one step; increases `seq` by one.

        Args:
            assignment: The batch.
            loss_sum: Sum of its losses; counted only if finite.
            tokens: Tokens that the losses cover.
            seconds: Seconds of audio.
            utterances: Utterances in the batch.
            unalignable: Utterances with too few frames for their tokens.
            skipped: Utterances that changed no weights because of a non-finite loss or gradient.
            unreadable: Utterances of the batch that are missing because their shards are damaged.
        """
        finite = math.isfinite(loss_sum)
        counts = {
            "utterances": int(utterances),
            "seconds": float(seconds),
            "loss_sum": float(loss_sum) if finite else 0.0,
            "tokens": float(tokens) if finite else 0.0,
            "unalignable": int(unalignable),
            "skipped": int(skipped),
            "unreadable": int(unreadable),
        }
        with self._lock:
            self._seq += 1
            self._step += 1
            key = (assignment.lease, assignment.number)
            self._in_hand.pop(key, None)
            self._announced.discard(key)
            self._safe.discard(key)
            self._unacked[self._seq] = len(assignment.rows)
            self._news.report(self._seq, assignment, counts)
            self._measure_step()

    def _measure_step(self) -> None:
        """Update the smoothed time between steps, in seconds."""
        now = time.monotonic()
        if self._last_step is not None:
            seconds = now - self._last_step
            self._step_s = seconds if not self._step_s else 0.7 * self._step_s + 0.3 * seconds
        self._last_step = now

    @property
    def seq(self) -> int:
        """Number of this incarnation's last report; a checkpoint record holds the value that belongs to its weights."""
        return self._seq

    @property
    def step(self) -> int:
        """Local steps that this node has made, in all its incarnations."""
        return self._step

    # --- what the coordinator last sent

    def view(self) -> View:
        """The view of the ring that the coordinator last sent."""
        return self._view

    def progress(self) -> Progress:
        """How far training is: the last figures of the coordinator plus this node's own steps since."""
        with self._lock:
            known, silent = self._progress, time.monotonic() - self._heard
            trained = min(known.trained + sum(self._unacked.values()), known.size * known.total)
        elapsed = known.elapsed + (silent if self._running else 0.0)
        return Progress(trained, known.size, known.total, known.closed, known.live, elapsed)

    def finish(self) -> str:
        """Why training has ended: `done`, `time`, `stop`, `failed: ...` or `coordinator lost`; "" while it runs.

        Stays "" until `snapshot_wanted` and `checkpoint_wanted` have returned the coordinator's last requests.
        """
        with self._lock:
            return "" if self._unseen and self._finish != COORDINATOR_LOST else self._finish

    def dropped(self) -> bool:
        """Whether the coordinator has dropped this node, which must then `rejoin`."""
        return self._dropped

    def checkpoint_wanted(self) -> int | None:
        """Number of the checkpoint of which this node must write its part; None after `checkpoint_done`."""
        with self._lock:
            self._unseen.discard("checkpoint")
            return self._checkpoint

    def checkpoint_done(self, number: int, record: Mapping[str, Any]) -> None:
        """Report that this node's part of a checkpoint is written.

        Args:
            number: The number that `checkpoint_wanted` returned.
            record: JSON values: `node`, `step`, `seq` (at the time of the weights), and what a resume needs.
        """
        with self._lock:
            if number not in self._answered:
                self._answered.add(number)
                self._news.records.append((number, dict(record)))
            if self._checkpoint == number:
                self._checkpoint = None
        self._wake.set()

    def snapshot_wanted(self) -> int | None:
        """The finished epoch (1 is the first) whose replica this node must write; None after `snapshot_written`."""
        with self._lock:
            self._unseen.discard("snapshot")
            return self._snapshot

    def snapshot_written(self, epoch: int) -> None:
        """Report that this node's replica of an epoch's end is written."""
        with self._lock:
            if epoch not in self._written:
                self._written.add(epoch)
                self._news.snapshots.append(epoch)
            if self._snapshot == epoch:
                self._snapshot = None
        self._wake.set()

    def journal(self, line: Mapping[str, Any]) -> None:
        """Add a line, with its `kind`, to the training's journal, through this node's spool file.

        Raises:
            CoordinatorError: If called before `join`.
        """
        with self._lock:
            if self._spool is None:
                raise CoordinatorError("a node that has not joined cannot write to the journal")
            self._spool.write(line)
