"""A node's connection to the coordinator: a thread sends a heartbeat every `beat_s`, so training never waits for it.

Without an answer the node goes on: with the leases that it has, then with a share of its own. It tells of it later.
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
    """Rank 0's connection to the coordinator. Only `join`, `rejoin`, `fail`, `leave` and `close` may wait.

        client = NodeClient("host:port", key, node=0, folder=folder)
        reply = client.join(endpoints)        # job, where weights come from; beats go out from now on
        ...                                   # build the model, get weights
        client.begin(planner, shard_of_row)   # from now on it is given work, and newcomers may take its weights
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
        key: The ring's key; None for a coordinator on this machine that has none.
        node: Number of the node.
        folder: The node's, for journal lines on their way.
    """

    def begin(self, planner: Planner, shard_of_row: NDArray[np.integer[Any]], arrived: Arrived | None = None) -> None:
        """This node has weights and wants work.

        Args:
            planner: Cuts leases into batches; called from the client's thread.
            shard_of_row: Shard of each of an epoch's rows.
            arrived: Told the batches of a new lease before any of them is given out; from the client's thread.

        Raises:
            CoordinatorError: If the index is not the coordinator's.
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
        """Take the next batch to train; None if there is nothing now.

        Raises:
            CoordinatorError: If this node cannot go on: its planner failed, or the coordinator does not understand it.
        """
        with self._lock:
            if self._error:
                raise CoordinatorError(self._error)
            first = self.peek(1)
            if self._work is None or not first or self._dropped:
                self._idle, self._last_step = True, None
                return None
            key = (first[0].lease, first[0].number)
            # while no coordinator answers, a batch is begun though the coordinator does not know of it
            self._idle, self._urgent = False, key not in self._safe and not self._alone
            if self._urgent:
                self._wake.set()
                return None
            self._in_hand[key] = first[0]
            return self._work.next()

    def peek(self, count: int) -> list[Assignment]:
        """The next batches, for reading ahead; the coordinator may yet give them to somebody else."""
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
        """A batch is trained: one step is made, `seq` grows by one.

        Args:
            assignment: The batch.
            loss_sum: Sum of its losses; counted only if it is finite.
            tokens: Tokens that the losses are over.
            seconds: Audio.
            utterances: In the batch.
            unalignable: Whose tokens do not fit their frames.
            skipped: Utterances that changed no weight, because loss or gradient was not finite.
            unreadable: Utterances that should have been in it and are lost with damaged shards.
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
        """Seconds between the last steps, smoothed."""
        now = time.monotonic()
        if self._last_step is not None:
            seconds = now - self._last_step
            self._step_s = seconds if not self._step_s else 0.7 * self._step_s + 0.3 * seconds
        self._last_step = now

    @property
    def seq(self) -> int:
        """Reports made by this incarnation; a checkpoint's record holds it as of its weights."""
        return self._seq

    @property
    def step(self) -> int:
        """Local steps that this node has made, in all its incarnations."""
        return self._step

    # --- what the coordinator says

    def view(self) -> View:
        """The ring, as the coordinator last told."""
        return self._view

    def progress(self) -> Progress:
        """How far training is: what the coordinator last told, and this node's own steps since."""
        with self._lock:
            known, silent = self._progress, time.monotonic() - self._heard
            trained = min(known.trained + sum(self._unacked.values()), known.size * known.total)
        elapsed = known.elapsed + (silent if self._running else 0.0)
        return Progress(trained, known.size, known.total, known.closed, known.live, elapsed)

    def finish(self) -> str:
        """Why training has ended: `done`, `time`, `stop`, `failed: ...` or `coordinator lost`; "" while it goes on.

        It goes on until `snapshot_wanted` and `checkpoint_wanted` have told the coordinator's last wishes.
        """
        with self._lock:
            return "" if self._unseen and self._finish != COORDINATOR_LOST else self._finish

    def dropped(self) -> bool:
        """Whether the coordinator has given this node up: it must `rejoin`."""
        return self._dropped

    def checkpoint_wanted(self) -> int | None:
        """Number of the checkpoint that this node is to write its part of, until it is done."""
        with self._lock:
            self._unseen.discard("checkpoint")
            return self._checkpoint

    def checkpoint_done(self, number: int, record: Mapping[str, Any]) -> None:
        """This node's part of a checkpoint is written.

        Args:
            number: What `checkpoint_wanted` said.
            record: JSON values: `node`, `step`, `seq` (as of the weights), and whatever a resume needs.
        """
        with self._lock:
            if number not in self._answered:
                self._answered.add(number)
                self._news.records.append((number, dict(record)))
            if self._checkpoint == number:
                self._checkpoint = None
        self._wake.set()

    def snapshot_wanted(self) -> int | None:
        """The epoch (1 is the first) that has ended and of which this node is to leave its replica, until it has."""
        with self._lock:
            self._unseen.discard("snapshot")
            return self._snapshot

    def snapshot_written(self, epoch: int) -> None:
        """This node's replica at an epoch's end is written."""
        with self._lock:
            if epoch not in self._written:
                self._written.add(epoch)
                self._news.snapshots.append(epoch)
            if self._snapshot == epoch:
                self._snapshot = None
        self._wake.set()

    def journal(self, line: Mapping[str, Any]) -> None:
        """Add a line, with its `kind`, to the training's journal, by way of a file of this node's.

        Raises:
            CoordinatorError: Before `join`.
        """
        with self._lock:
            if self._spool is None:
                raise CoordinatorError("a node that has not joined cannot write to the journal")
            self._spool.write(line)
