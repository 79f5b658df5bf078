"""A node's session with the coordinator: joining, heartbeats, leaving, and what a node does during an outage."""

import logging
import threading
import time
import uuid
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.coordinator.client import CoordinatorClient
from training.coordinator.membership import View
from training.coordinator.messages import (
    CoordinatorError,
    CoordinatorUnreachableError,
    JoinReply,
    Message,
    Progress,
    unpack_bits,
)
from training.coordinator.outbox import REPORTS, Outbox
from training.coordinator.spool import JournalSpool
from training.coordinator.worklist import Arrived, Assignment, Planner, Worklist, plan_lease
from training.processes.keys import RingKey

log = logging.getLogger(__name__)

COORDINATOR_LOST = "coordinator lost"
"""Value of `finish` after `membership.coordinator_patience_s` without an answer."""
AHEAD_BEATS = 3
"""Batches are announced to the coordinator this many heartbeats before they are started."""
WANT_BEATS = 4
"""Work is requested when less than this many heartbeats' worth is left."""
ANSWER_S = 1.0
"""Minimum timeout of a heartbeat; the next one repeats what it reported."""
STOPPED_S = 0.5
"""If a request exceeds its timeout by more than this, this process was suspended: the coordinator is not to blame."""


class CoordinatorSession:
    """Joining, leaving and the heartbeat thread; `NodeClient` adds the public methods for training.

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
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._talk = threading.Lock()
        """Held during a heartbeat: joining and leaving wait for it."""
        self._thread: threading.Thread | None = None
        self._incarnation = self._kept = self._session = ""
        self._spool: JournalSpool | None = None
        self._view, self._progress = View(), Progress()
        self._step, self._seed, self._beat_s = 0, 0, 0.5
        self._grace_s, self._patience_s = 10.0, 600.0
        self._trained_before: dict[int, NDArray[np.bool_]] = {}
        self._planner: Planner | None = None
        self._arrived: Arrived | None = None
        self._reset()

    def _reset(self) -> None:
        """Reset what belongs to an incarnation."""
        self._news = Outbox()
        self._work: Worklist | None = None
        self._announced: set[tuple[str, int]] = set()
        self._safe: set[tuple[str, int]] = set()
        self._urgent = self._alone = False
        self._in_hand: dict[tuple[str, int], Assignment] = {}
        self._unacked: dict[int, int] = {}
        self._last_revoked = 0
        self._ready = self._dropped = self._idle = self._running = False
        self._finish, self._error = "", ""
        self._snapshot: int | None = None
        self._checkpoint: int | None = None
        self._unseen: set[str] = set()
        self._written: set[int] = set()
        self._answered: set[int] = set()
        self._pools: dict[int, int] = {}
        self._seq = self._acked = 0
        self._last_step: float | None = None
        self._step_s = 0.0
        self._heard = time.monotonic()

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
        return self._join(endpoints, patience_s, damaged, self._incarnation)

    def _join(self, endpoints: tuple[str, ...], patience_s: float, damaged: str, previous: str) -> JoinReply:
        incarnation = uuid.uuid4().hex[:16]
        message = {
            "op": "join",
            "node": self._node,
            "incarnation": incarnation,
            "previous": previous,
            "kept": self._kept,
            "endpoints": list(endpoints),
            "damaged": damaged,
        }
        with self._talk:
            value = self._client.request(message, patience_s)
            reply = JoinReply.from_dict(value)
            with self._lock:
                self._enter(reply, value)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
            self._thread.start()
        return reply

    def _enter(self, reply: JoinReply, value: Message) -> None:
        unreported = self._news if reply.source == "own" and reply.session == self._session else Outbox()
        unreported.renumber()
        step = self._step if unreported.reports else reply.step
        self._reset()
        self._news, self._step = unreported, step
        self._seq = len(unreported.reports)
        self._incarnation, self._session = reply.incarnation, reply.session
        self._view, self._progress, self._finish = reply.view, reply.progress, reply.finish
        train = reply.job["train"]
        member = train["membership"]
        self._seed, self._beat_s = int(reply.job["seed"]), float(member["beat_s"])
        self._grace_s, self._patience_s = float(member["coordinator_grace_s"]), float(member["coordinator_patience_s"])
        size = reply.progress.size
        self._trained_before = {int(epoch): unpack_bits(bits, size) for epoch, bits in value["trained"].items()}
        if self._spool is not None:
            self._spool.close()
        self._spool = JournalSpool(self._folder, reply.session, reply.incarnation)

    def fail(self, reason: str, *, patience_s: float = 5.0) -> None:
        """Report a permanent failure: this node has diverged, or cannot work. Waits at most `patience_s`."""
        self._end({"op": "fail", "reason": reason}, patience_s)

    def leave(self, *, patience_s: float = 5.0) -> None:
        """Leave the ring after everything is reported. Waits at most `patience_s`."""
        self._end({"op": "leave", "reason": ""}, patience_s)

    def _end(self, message: Message, patience_s: float) -> None:
        self._stopping.set()
        self._wake.set()
        if self._finish == COORDINATOR_LOST:
            return
        deadline = time.monotonic() + patience_s
        with self._talk:
            try:
                while not self._dropped and self._incarnation and self._untold() and time.monotonic() < deadline:
                    self._beat(deadline - time.monotonic())
                left = max(0.1, deadline - time.monotonic())
                self._client.request({**message, "incarnation": self._incarnation}, left)
            except CoordinatorError as error:
                log.warning("node %d could not sign off: %s", self._node, error)

    def _untold(self) -> bool:
        with self._lock:
            return bool(self._news) or (self._spool is not None and bool(self._spool.portions()))

    def close(self) -> None:
        """End the thread and the connection; without `leave`, the coordinator treats the node as lost."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(10.0)
        with self._talk:
            self._client.close()
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    # --- the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._beat_s / 5 if self._idle else self._beat_s)
            self._wake.clear()
            if self._dropped or self._error:
                self._stopping.wait(self._beat_s / 5)
                continue
            with self._talk:
                if not self._stopping.is_set() and not self._dropped:
                    self._talk_once()

    def _talk_once(self) -> None:
        patience_s, started = max(ANSWER_S, 2 * self._beat_s), time.monotonic()
        try:
            self._beat(patience_s)
        except CoordinatorUnreachableError:
            late = time.monotonic() - started - patience_s
            if late > STOPPED_S:
                self._heard += late
            else:
                self._alone = True
                self._go_on_alone()
        except Exception as error:
            log.exception("node %d cannot continue", self._node)
            self._error = f"{error}"

    def _beat(self, patience_s: float) -> None:
        with self._lock:
            message = self._message()
            announced = set(self._announced)
        value = self._client.request(message, patience_s)
        with self._lock:
            self._news.forget(message)
            self._safe = announced & self._announced
            self._hear(value)
            work, planner = self._work, self._planner
        if work is None or planner is None or self._dropped:
            return
        for lease in value["leases"]:
            if not work.knows(str(lease["id"])):
                # planning may take a while, so it runs outside the lock
                self._add(work, plan_lease(planner, lease, len(work.shards)))

    def _add(self, work: Worklist, assignments: list[Assignment]) -> None:
        with self._lock:
            if self._work is not work:
                return
            arrived = self._arrived
        if arrived is not None and assignments:
            arrived(assignments)
        with self._lock:
            if self._work is work:
                work.add(assignments)
                self._wake.set()

    def _message(self) -> Message:
        """Compose a heartbeat with everything new."""
        work = self._work
        for assignment in self._in_hand.values():
            self._announce(assignment)
        # a batch is announced before it is started, so that the coordinator knows what a killed node had started
        ahead = int(AHEAD_BEATS * self._beat_s / self._step_s) if self._step_s else 2
        for assignment in work.peek(max(ahead, int(self._urgent))) if work else []:
            if not assignment.own:  # own batches that are not started are dropped as soon as the coordinator answers
                self._announce(assignment)
        return {
            "op": "beat",
            "incarnation": self._incarnation,
            "ready": self._ready,
            "view": self._view.number,
            "want": self._wants(),
            "have": work.seen if work else [],
            "empty": work is not None and not work and not self._in_hand and len(self._news.reports) <= REPORTS,
            "spools": self._spool.portions() if self._spool else [],
            **self._news.message(),
        }

    def _announce(self, assignment: Assignment) -> None:
        if (assignment.lease, assignment.number) not in self._announced:
            self._announced.add((assignment.lease, assignment.number))
            self._news.begin(assignment)

    def _wants(self) -> bool:
        if self._work is None or self._finish:
            return False
        if not self._step_s:
            return len(self._work) < 2
        return len(self._work) * self._step_s < WANT_BEATS * self._beat_s

    def _hear(self, value: Message) -> None:
        """Process the answer to a heartbeat."""
        if self._alone:
            self._wake.set()  # report at once what was started in the meantime
        self._heard, self._alone = time.monotonic(), False
        self._finish = str(value["finish"])
        if value["dropped"]:
            self._dropped = True
            return
        self._acked = int(value["seq"])
        self._unacked = {seq: rows for seq, rows in self._unacked.items() if seq > self._acked}
        self._progress = Progress.from_dict(value["progress"])
        self._running = bool(value["running"])
        self._pools = {int(epoch): int(position) for epoch, position in value["pools"].items()}
        if value["view"] is not None:
            self._view = View.from_dict(value["view"])
        if self._spool is not None:
            self._spool.arrived(value["spools"])
        self._hear_wishes(value)
        if self._work is not None:
            self._work.drop_own()
            if value["revoke"] is not None and value["revoke"]["number"] != self._last_revoked:
                self._give_back(self._work, value["revoke"])

    def _hear_wishes(self, value: Message) -> None:
        """Note the requested replica and checkpoint; the learner sees them before `finish` reports the end."""
        snapshot, checkpoint = value["snapshot"], value["checkpoint"]
        snapshot = snapshot if snapshot not in self._written else None
        checkpoint = checkpoint if checkpoint not in self._answered else None
        if snapshot is not None and snapshot != self._snapshot:
            self._unseen.add("snapshot")
        if checkpoint is not None and checkpoint != self._checkpoint:
            self._unseen.add("checkpoint")
        self._snapshot, self._checkpoint = snapshot, checkpoint

    def _give_back(self, work: Worklist, wish: Message) -> None:
        self._last_revoked = int(wish["number"])
        given = work.give_back(int(wish["epoch"]), int(wish["utterances"]))
        self._announced -= {(assignment.lease, assignment.number) for assignment in given}
        self._news.give_back(self._last_revoked, given)
        self._wake.set()

    def _go_on_alone(self) -> None:
        """Handle an outage: take an own share after `coordinator_grace_s`, give up after `coordinator_patience_s`."""
        silent = time.monotonic() - self._heard
        with self._lock:
            work, planner, nodes = self._work, self._planner, self._view.nodes
            if silent > self._patience_s:
                self._finish = COORDINATOR_LOST
            busy = work is None or planner is None or len(work) > 0 or self._finish
            if busy or silent <= self._grace_s or not self._running or self._node not in nodes:
                return
            assert work is not None
            assert planner is not None
            place = nodes.index(self._node)
            share = work.own_share(self._progress.closed, self._pools, place, len(nodes))
        if share is not None:
            log.warning("node %d: no answer from the coordinator for %.0f s, taking its share", self._node, silent)
            self._add(work, work.take_own(planner, *share))
