"""A node's connection to the coordinator: a thread sends a heartbeat every `beat_s`, so that training never waits.

During an outage the node continues with the leases that it has, then with its share of the unleased rows. It reports
these when the coordinator is back.
"""

import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from training.coordinator.client import CoordinatorClient
from training.coordinator.journal import LineFile
from training.coordinator.membership import View
from training.coordinator.messages import (
    AveragedModel,
    CheckpointRecord,
    CoordinatorError,
    CoordinatorFailedError,
    CoordinatorUnreachableError,
    Counts,
    JoinReply,
    JoinRequest,
    JsonObject,
    LeaveRequest,
    NamedData,
    Progress,
    SpoolPortion,
)
from training.coordinator.node_state import COORDINATOR_LOST, NodeState
from training.coordinator.worklist import Arrived, Assignment, Planner, Worklist, plan_lease
from training.processes.keys import RingKey

log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Minimum timeout of a heartbeat; the next one repeats what it reported."""
STOPPED_S = 0.5
"""If a request exceeds its timeout by more than this, this process was suspended: the coordinator is not to blame."""


class NodeClient:
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

    def __init__(self, address: str, key: RingKey | None, node: int, *, folder: Path) -> None:
        self._client = CoordinatorClient(address, key)
        self._node, self._folder = node, folder
        self._lock = threading.RLock()
        self._thread = HeartbeatThread(self._try_beat, self._pause_s)
        self._spool: JournalSpool | None = None
        self._state, self._error = NodeState(), ""
        self.data: NamedData | None = None
        """Data set to train on, for `join`; only if the job names none."""
        self.model: AveragedModel | None = None
        """What this node averages, for `join`; only if the job does not say it."""
        self._beat_s, self._grace_s, self._patience_s = 0.5, 10.0, 600.0

    # --- joining and leaving

    def join(self, endpoints: tuple[str, ...], *, patience_s: float = 60.0, damaged: str = "") -> JoinReply:
        """Become a member.

        Args:
            endpoints: Endpoints of the exchanges of this node's ranks.
            patience_s: How long the coordinator may take to answer.
            damaged: `JoinReply.resume` of an earlier reply, if its files turned out to be damaged.

        Raises:
            CoordinatorUnreachableError: No answer in time.
            CoordinatorError: The coordinator refused.
        """
        return self._join(endpoints, patience_s, damaged, "")

    def rejoin(self, endpoints: tuple[str, ...], *, patience_s: float = 60.0, damaged: str = "") -> JoinReply:
        """Become a member again, after `dropped` or because no weights could be fetched; arguments as for `join`.

        The reply's `source` is `own` if no other node has weights and this node has kept its own.
        """
        return self._join(endpoints, patience_s, damaged, self._state.incarnation)

    def _join(self, endpoints: tuple[str, ...], patience_s: float, damaged: str, previous: str) -> JoinReply:
        request = JoinRequest(
            node=self._node,
            incarnation=uuid.uuid4().hex[:16],
            previous=previous,
            kept=self._state.kept,
            endpoints=endpoints,
            damaged=damaged,
            data=self.data,
            model=self.model,
        )
        with self._thread.lock:
            reply = self._client.request(request, patience_s)
            with self._lock:
                self._enter(reply)
        self._thread.start()
        return reply

    def _enter(self, reply: JoinReply) -> None:
        self._state, self._error = NodeState(reply, self._state), ""
        member = reply.job["train"]["membership"]
        self._beat_s = float(member["beat_s"])
        self._grace_s, self._patience_s = float(member["coordinator_grace_s"]), float(member["coordinator_patience_s"])
        if self._spool is not None:
            self._spool.close()
        self._spool = JournalSpool(self._folder, reply.session, reply.incarnation)

    def begin(self, planner: Planner, shard_of_row: NDArray[np.integer[Any]], arrived: Arrived | None = None) -> None:
        """Announce that this node has weights and wants leases.

        Args:
            planner: Cuts leases into batches; called from the client's thread.
            shard_of_row: Shard of each row of an epoch [rows].
            arrived: Called from the client's thread with the batches of a new lease, before `next` returns any of them.

        Raises:
            CoordinatorError: If this node's index differs from the coordinator's.
        """
        with self._lock:
            self._state.begin(planner, shard_of_row, arrived)
        self._thread.wake()

    def fail(self, reason: str, *, patience_s: float = 5.0) -> None:
        """Report a permanent failure: this node has diverged, or cannot work. Waits at most `patience_s`."""
        self._end("fail", reason, patience_s)

    def leave(self, *, patience_s: float = 5.0) -> None:
        """Leave the ring after everything is reported, unless this node never joined. Waits at most `patience_s`."""
        if self._state.incarnation:
            self._end("leave", "", patience_s)

    def _end(self, op: Literal["leave", "fail"], reason: str, patience_s: float) -> None:
        self._thread.stop()
        if self._state.known.finish == COORDINATOR_LOST:
            return
        deadline = time.monotonic() + patience_s
        with self._thread.lock:
            try:
                while self._must_report() and time.monotonic() < deadline:
                    self._beat(deadline - time.monotonic())
                request = LeaveRequest(op=op, incarnation=self._state.incarnation, reason=reason)
                self._client.request(request, max(0.1, deadline - time.monotonic()))
            except (CoordinatorError, CoordinatorUnreachableError, CoordinatorFailedError) as error:
                log.warning("node %d could not sign off: %s", self._node, error)

    def _must_report(self) -> bool:
        with self._lock:
            waiting = bool(self._state.outbox) or (self._spool is not None and bool(self._spool.portions()))
            return waiting and bool(self._state.incarnation) and not self._state.known.dropped

    def close(self) -> None:
        """End the thread and the connection; without `leave`, the coordinator treats the node as lost."""
        self._thread.stop()
        self._thread.join(10.0)
        with self._thread.lock:
            self._client.close()
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    # --- work

    def next(self) -> Assignment | None:
        """Take the next batch to train; None if there is none at the moment.

        Raises:
            CoordinatorError: If this node cannot continue: its planner failed, or the coordinator refused a request.
        """
        with self._lock:
            if self._error:
                raise CoordinatorError(self._error)
            assignment = self._state.next()
            if self._state.urgent:
                self._thread.wake()
            return assignment

    def peek(self, count: int) -> list[Assignment]:
        """The next batches, for prefetching; the coordinator may still lease them to another node."""
        with self._lock:
            return self._state.queue.peek(count) if self._state.queue is not None else []

    def trained(self, assignment: Assignment, *, loss_sum: float, tokens: float, **counts: float) -> None:
        """Report a trained batch, which is one step; increases `seq` by one.

        Args:
            assignment: The batch.
            loss_sum: Sum of its losses; counted only if finite.
            tokens: Tokens that the losses cover.
            counts: Other fields of `Counts`.
        """
        if not math.isfinite(loss_sum):
            loss_sum = tokens = 0.0
        counted = Counts.model_validate({"loss_sum": loss_sum, "tokens": tokens, **counts})
        with self._lock:
            self._state.trained(assignment, counted)

    @property
    def seq(self) -> int:
        """Number of this incarnation's last report; a checkpoint record holds the value that belongs to its weights."""
        return self._state.seq

    @property
    def step(self) -> int:
        """Local steps that this node has made, in all its incarnations."""
        return self._state.step

    # --- what the coordinator last sent

    def view(self) -> View:
        """The view of the ring that the coordinator last sent."""
        return self._state.view

    def progress(self) -> Progress:
        """How far training is: the last figures of the coordinator plus this node's own steps since."""
        with self._lock:
            return self._state.progress()

    def finish(self) -> str:
        """Why training has ended: `done`, `limit`, `stop`, `failed: ...` or `coordinator lost`; "" while it runs.

        Stays "" until `snapshot_wanted` and `checkpoint_wanted` have returned the coordinator's last requests.
        """
        with self._lock:
            return self._state.finish()

    def dropped(self) -> bool:
        """Whether the coordinator has dropped this node, which must then `rejoin`."""
        return self._state.known.dropped

    def checkpoint_wanted(self) -> int | None:
        """Number of the checkpoint of which this node must write its part; None after `checkpoint_done`."""
        with self._lock:
            return self._state.checkpoint.look()

    def checkpoint_done(self, number: int, record: Mapping[str, Any]) -> None:
        """Report that this node's part of a checkpoint is written.

        Args:
            number: The number that `checkpoint_wanted` returned.
            record: JSON values: `node`, `step`, `seq` (at the time of the weights), and what a resume needs.
        """
        with self._lock:
            if self._state.checkpoint.fulfill(number):
                self._state.outbox.records.append((number, CheckpointRecord.model_validate(record)))
        self._thread.wake()

    def snapshot_wanted(self) -> int | None:
        """The finished epoch (1 is the first) whose replica this node must write; None after `snapshot_written`."""
        with self._lock:
            return self._state.snapshot.look()

    def snapshot_written(self, epoch: int) -> None:
        """Report that this node's replica of an epoch's end is written."""
        with self._lock:
            if self._state.snapshot.fulfill(epoch):
                self._state.outbox.snapshots.append(epoch)
        self._thread.wake()

    def journal(self, line: Mapping[str, Any]) -> None:
        """Add a line, with its `kind`, to the training's journal, through this node's spool file.

        Raises:
            CoordinatorError: If called before `join`.
        """
        with self._lock:
            if self._spool is None:
                raise CoordinatorError("a node that has not joined cannot write to the journal")
            self._spool.write(line)

    # --- the thread

    def _pause_s(self) -> float:
        return self._beat_s / 5 if self._state.idle or self._state.known.dropped or self._error else self._beat_s

    def _try_beat(self) -> None:
        if self._state.known.dropped or self._error:
            return
        patience_s, started = max(ANSWER_S, 2 * self._beat_s), time.monotonic()
        try:
            self._beat(patience_s)
        except CoordinatorUnreachableError:
            late = time.monotonic() - started - patience_s
            if late > STOPPED_S:
                self._state.heard += late
            else:
                self._continue_alone()
        except Exception as error:
            log.exception("node %d cannot continue", self._node)
            self._error = f"{error}"

    def _beat(self, patience_s: float) -> None:
        with self._lock:
            beat = self._state.heartbeat(self._beat_s, self._spool.portions() if self._spool else ())
        reply = self._client.request(beat, patience_s)
        with self._lock:
            if self._state.hear(beat, reply):
                self._thread.wake()
            if self._spool is not None:
                self._spool.arrived(reply.spools)
            queue, planner = self._state.queue, self._state.planner
        if queue is None or planner is None:
            return
        for lease in reply.leases:
            if not queue.knows(lease.id):
                # planning may take a while, so it runs outside the lock
                self._add(queue, plan_lease(planner, lease, len(queue.shards)))

    def _add(self, queue: Worklist, assignments: list[Assignment]) -> None:
        """Add planned batches, unless the node has left the incarnation that they were planned for."""
        with self._lock:
            if self._state.queue is not queue:
                return
            arrived = self._state.arrived
        if arrived is not None and assignments:
            arrived(assignments)
        with self._lock:
            if self._state.queue is queue:
                queue.add(assignments)
                self._thread.wake()

    def _continue_alone(self) -> None:
        """Handle an outage: take an own share after `coordinator_grace_s`, give up after `coordinator_patience_s`."""
        state, silent = self._state, time.monotonic() - self._state.heard
        with self._lock:
            state.alone = True
            if silent > self._patience_s:
                state.lose_coordinator()
            share = state.own_share(self._node) if silent > self._grace_s else None
            queue, planner = state.queue, state.planner
        if share is not None and queue is not None and planner is not None:
            log.warning("node %d: no answer from the coordinator for %.0f s, taking its share", self._node, silent)
            self._add(queue, queue.take_own(planner, *share))


# --- the thread that sends heartbeats


class HeartbeatThread:
    """Calls a function again and again, after a pause or when it is woken.

    Args:
        beat: Exchanges one heartbeat.
        pause_s: Returns the seconds until the next one.

    Attributes:
        lock: Held during a heartbeat: joining and leaving wait for it.
    """

    def __init__(self, beat: Callable[[], None], pause_s: Callable[[], float]) -> None:
        self._beat, self._pause_s = beat, pause_s
        self._wake, self._stopping = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Send the next heartbeat at once."""
        self._wake.set()

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._stopping.set()
        self._wake.set()

    def join(self, patience_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._pause_s())
            self._wake.clear()
            with self.lock:
                if not self._stopping.is_set():
                    self._beat()


# --- the spool of journal lines


PORTION = 65536
"""Maximum bytes of journal lines per message."""
MOST_WAITING = 1 << 24
"""Maximum bytes kept in memory while the disk is full: hours of lines."""


class JournalSpool:
    """Files of journal lines, and how much of each the coordinator has received.

    Each line reaches it exactly once, also after an outage.

    Args:
        folder: The node's folder.
        session: Name of the session; lines of other sessions are void and are deleted.
        incarnation: Part of the name of the file that is written.
    """

    def __init__(self, folder: Path, session: str, incarnation: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for path in folder.glob("lines-*.jsonl"):
            if not path.name.startswith(f"lines-{session}-"):
                path.unlink(missing_ok=True)
        # an earlier incarnation that was killed may have left lines that the coordinator does not have
        self._sent = {path.name: 0 for path in folder.glob(f"lines-{session}-*.jsonl")}
        self._name = f"lines-{session}-{incarnation}.jsonl"
        self._sent[self._name] = 0
        self._file = LineFile(folder / self._name)
        self._waiting = bytearray()
        """Lines that could not be written to the file yet."""
        self._failure_logged, self._dropped = False, 0

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; if the disk is full, it waits in memory and is sent from there."""
        data = (json.dumps(dict(line)) + "\n").encode()
        if len(self._waiting) + len(data) > MOST_WAITING:
            self._dropped += 1
            return
        self._waiting += data
        self._write_out()

    def _write_out(self) -> None:
        del self._waiting[: self._file.append(bytes(self._waiting))]
        if self._waiting:
            if not self._failure_logged:
                path, why = self._file.path, self._file.trouble
                log.error("%s cannot be written, journal lines wait in memory: %s", path, why)
            self._failure_logged = True
            return
        if self._failure_logged:
            log.warning("%s can be written again; %d journal lines are lost", self._file.path, self._dropped)
        self._failure_logged, self._dropped = False, 0

    def portions(self) -> tuple[SpoolPortion, ...]:
        """What to send next: lines of one file that the coordinator does not have."""
        if self._waiting:
            self._write_out()
        for name, offset in self._sent.items():
            data = self._read(name, offset)
            end = data.rfind(b"\n") + 1
            if end:
                lines = [line for text in data[:end].splitlines() if (line := _parse(text)) is not None]
                return (SpoolPortion(name=name, offset=offset, end=offset + end, lines=tuple(lines)),)
        return ()

    def _read(self, name: str, offset: int) -> bytes:
        """Bytes of a file from an offset; lines that wait in memory count as its end."""
        if name == self._name:
            written = self._file.read(offset, PORTION)
            start = offset + len(written) - self._file.size
            return written + bytes(self._waiting[max(0, start) : max(0, start) + PORTION - len(written)])
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(offset)
                return file.read(PORTION)
        except FileNotFoundError:
            return b""

    def arrived(self, offsets: Mapping[str, int]) -> None:
        """Record how much of each file the coordinator has received."""
        for name, offset in offsets.items():
            if name in self._sent:
                self._sent[name] = offset

    def close(self) -> None:
        """Close the file; it is kept until the session ends."""
        if self._waiting or self._dropped:
            log.error("journal lines of this node are lost: %s cannot be written", self._file.path)
        self._file.close()


def _parse(text: bytes) -> JsonObject | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
