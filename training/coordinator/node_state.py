"""What a node knows in one incarnation: its batches, what it has to report, what the coordinator last sent.

Pure state; `NodeClient` protects it with a lock and exchanges the messages.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.coordinator.epochs import ShardMap
from training.coordinator.membership import View
from training.coordinator.messages import (
    CheckpointRecord,
    CoordinatorError,
    Counts,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    Progress,
    ReturnedBatch,
    Revocation,
    SpoolPortion,
    StartedBatch,
    TrainedBatch,
)
from training.coordinator.packing import Rows, pack_rows, unpack_bits
from training.coordinator.worklist import Arrived, Assignment, Planner, Worklist

COORDINATOR_LOST = "coordinator lost"
"""Value of `finish` after `membership.coordinator_patience_s` without an answer."""
AHEAD_BEATS = 3
"""Batches are announced to the coordinator this many heartbeats before they are started."""
WANT_BEATS = 4
"""Work is requested when less than this many heartbeats' worth is left."""
_NOT_JOINED = JoinReply(incarnation="", session="", view=View(), job={"seed": 0}, progress=Progress(), source="initial")


# --- the outbox


REPORTS = 500
"""Maximum number of reports per message."""


@dataclass
class Outbox:
    """What the next heartbeat reports; the attributes are fields of `Heartbeat`.

    It is kept until the coordinator has acknowledged it, so that an outage loses nothing.
    """

    reports: list[TrainedBatch] = field(default_factory=list)
    started: list[StartedBatch] = field(default_factory=list)
    returned: list[ReturnedBatch] = field(default_factory=list)
    answered: int = 0
    snapshots: list[int] = field(default_factory=list)
    records: list[tuple[int, CheckpointRecord]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def fields(self) -> dict[str, Any]:
        """Fields of the next heartbeat."""
        more = len(self.reports) > REPORTS
        # a record must not arrive before the reports that its weights contain
        return vars(self) | {"reports": self.reports[:REPORTS], "records": [] if more else self.records}

    def forget(self, sent: Heartbeat) -> None:
        """Remove what an acknowledged heartbeat contained."""
        for name in ("reports", "started", "returned", "snapshots", "records"):
            del getattr(self, name)[: len(getattr(sent, name))]
        if self.answered == sent.answered:
            self.answered = 0

    def renumbered(self) -> "Outbox":
        """What a new incarnation still has to report: the reports, renumbered from 1, and the replicas."""
        reports = [report.model_copy(update={"seq": number}) for number, report in enumerate(self.reports, 1)]
        return Outbox(reports=reports, snapshots=self.snapshots)

    def start(self, assignment: Assignment) -> None:
        """Add a batch that was started or soon will be."""
        rows = pack_rows(assignment.rows)
        self.started.append(StartedBatch(epoch=assignment.epoch, own=assignment.own, rows=rows))

    def report(self, seq: int, assignment: Assignment, counts: Counts) -> None:
        """Add a trained batch."""
        self.reports.append(
            TrainedBatch(seq=seq, epoch=assignment.epoch, rows=pack_rows(assignment.rows), counts=counts)
        )

    def give_back(self, number: int, assignments: list[Assignment]) -> None:
        """Add the batches that are returned in answer to a revocation."""
        self.answered = number
        for given in assignments:
            self.returned.append(ReturnedBatch(epoch=given.epoch, lease=int(given.lease), rows=pack_rows(given.rows)))


# --- the state


class Demand:
    """The coordinator's demands to write a checkpoint or a replica; each is fulfilled once.

    Attributes:
        number: The checkpoint or epoch that must be written now, or None.
        unseen: Whether the learner has not looked at it.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.unseen = False
        self._fulfilled: set[int] = set()

    def hear(self, number: int | None) -> None:
        """Record what the coordinator demands."""
        number = None if number in self._fulfilled else number
        self.unseen = self.unseen or number not in (None, self.number)
        self.number = number

    def look(self) -> int | None:
        """What must be written now, or None."""
        self.unseen = False
        return self.number

    def fulfill(self, number: int) -> bool:
        """Record that it is written; False if it was before."""
        if self.number == number:
            self.number = None
        first = number not in self._fulfilled
        self._fulfilled.add(number)
        return first


class NodeState:
    """State of a node in one incarnation.

    Args:
        reply: The coordinator's reply when the node joined.
        previous: State in the previous incarnation.

    Attributes:
        outbox: What it has to report.
        queue: Its batches; None until it has weights.
        planner: Cuts leases into batches.
        arrived: Called with the batches of a new lease.
        checkpoint: Demands for checkpoints.
        snapshot: Demands for replicas.
        known: The coordinator's last reply.
        view: The view of the ring that the coordinator last sent.
        kept: The incarnation whose weights it has, or "".
        seq: Number of its last report.
        step: Local steps that it has made, in all incarnations.
        alone: Whether the coordinator does not answer.
        heard: Monotonic time of the last answer.
        idle: Whether it has no batch to train.
        urgent: Whether its next batch must be announced before it may start.
    """

    def __init__(self, reply: JoinReply = _NOT_JOINED, previous: "NodeState | None" = None) -> None:
        self._joined = reply
        self.incarnation, self.session, self.view = reply.incarnation, reply.session, reply.view
        self.known = HeartbeatReply(progress=reply.progress, finish=reply.finish)
        self.kept: str = previous.kept if previous else ""
        self.outbox, self.step = Outbox(), reply.step
        if previous is not None and reply.source == "own" and reply.session == previous.session:
            self.outbox = previous.outbox.renumbered()
            self.step = previous.step if self.outbox.reports else reply.step
        self.seq = len(self.outbox.reports)
        self.queue: Worklist | None = None
        self.planner: Planner | None = None
        self.arrived: Arrived | None = None
        self.checkpoint, self.snapshot = Demand(), Demand()
        self.alone = self.idle = self.urgent = False
        self.heard = time.monotonic()
        self._announced: set[tuple[str, int]] = set()
        self._sent: set[tuple[str, int]] = set()
        """Batches announced up to the last heartbeat that was sent."""
        self._safe: set[tuple[str, int]] = set()
        """Batches whose announcement has arrived."""
        self._in_hand: dict[tuple[str, int], Assignment] = {}
        self._unacked: dict[int, int] = {}
        """Utterances of reports that have not arrived, by `seq`."""
        self._last_revoked = 0
        self._last_step: float | None = None
        self._step_s = 0.0

    # --- work

    def begin(self, planner: Planner, shard_of_row: NDArray[np.integer[Any]], arrived: Arrived | None) -> None:
        """Take leases from now on; the arguments are those of `NodeClient.begin`."""
        size, total = self.known.progress.size, self.known.progress.total
        if len(shard_of_row) != size:
            raise CoordinatorError(
                f"this node's index has {len(shard_of_row)} utterances, the coordinator's {size}: "
                "is train_url the same?"
            )
        trained = {epoch: unpack_bits(bits, size) for epoch, bits in self._joined.trained.items()}
        self.planner, self.arrived, self.kept = planner, arrived, self.incarnation
        self.queue = Worklist(ShardMap(shard_of_row), int(self._joined.job["seed"]), total, trained)

    def next(self) -> Assignment | None:
        """Take the next batch; None if there is none, or if it must be announced first (`urgent`)."""
        first = self.queue.peek(1) if self.queue is not None and not self.known.dropped else []
        if self.queue is None or not first:
            self.idle, self.urgent, self._last_step = True, False, None
            return None
        # during an outage, batches are started without announcing them to the coordinator first
        self.idle, self.urgent = False, first[0].key not in self._safe and not self.alone
        if self.urgent:
            return None
        self._in_hand[first[0].key] = first[0]
        return self.queue.next()

    def trained(self, assignment: Assignment, counts: Counts) -> None:
        """Record a trained batch."""
        self.seq += 1
        self.step += 1
        self._in_hand.pop(assignment.key, None)
        self._announced.discard(assignment.key)
        self._safe.discard(assignment.key)
        self._unacked[self.seq] = len(assignment.rows)
        self.outbox.report(self.seq, assignment, counts)
        now = time.monotonic()
        if self._last_step is not None:
            seconds = now - self._last_step
            self._step_s = seconds if not self._step_s else 0.7 * self._step_s + 0.3 * seconds
        self._last_step = now

    def progress(self) -> Progress:
        """How far training is: the last figures of the coordinator plus this node's own steps since."""
        known, silent = self.known.progress, time.monotonic() - self.heard
        trained = min(known.trained + sum(self._unacked.values()), known.size * known.total)
        elapsed = known.elapsed + (silent if self.known.running else 0.0)
        return replace(known, trained=trained, elapsed=elapsed)

    def finish(self) -> str:
        """Why training has ended, or ""; "" until the learner has seen the last demands."""
        lost, unseen = self.known.finish == COORDINATOR_LOST, self.checkpoint.unseen or self.snapshot.unseen
        return "" if unseen and not lost else self.known.finish

    # --- heartbeats

    def heartbeat(self, beat_s: float, spools: tuple[SpoolPortion, ...]) -> Heartbeat:
        """Compose a heartbeat with everything new."""
        self._announce(beat_s)
        trained = self.queue is not None and not self.queue and not self._in_hand
        return Heartbeat(
            incarnation=self.incarnation,
            ready=self.queue is not None,
            view=self.view.number,
            want=not self.known.finish and self._wants(beat_s),
            have=tuple(self.queue.seen) if self.queue is not None else (),
            empty=trained and len(self.outbox.reports) <= REPORTS,
            spools=spools,
            **self.outbox.fields(),
        )

    def _announce(self, beat_s: float) -> None:
        """Announce batches before they are started, so that the coordinator knows what a killed node had started."""
        ahead = int(AHEAD_BEATS * beat_s / self._step_s) if self._step_s else 2
        coming = self.queue.peek(max(ahead, int(self.urgent))) if self.queue is not None else []
        # own batches that are not started are dropped as soon as the coordinator answers
        for assignment in [*self._in_hand.values(), *(batch for batch in coming if not batch.own)]:
            if assignment.key not in self._announced:
                self._announced.add(assignment.key)
                self.outbox.start(assignment)
        self._sent = set(self._announced)

    def _wants(self, beat_s: float) -> bool:
        if self.queue is None or not len(self.queue.shards):
            return False
        if not self._step_s:
            return len(self.queue) < 2
        return len(self.queue) * self._step_s < WANT_BEATS * beat_s

    def hear(self, beat: Heartbeat, reply: HeartbeatReply) -> bool:
        """Process the reply to a heartbeat; returns whether there is something to report at once."""
        urgent = self.alone  # what was started in the meantime
        self.outbox.forget(beat)
        self._safe = self._sent & self._announced
        self.heard, self.alone = time.monotonic(), False
        if reply.dropped:
            self.known = self.known.model_copy(update={"dropped": True, "finish": reply.finish})
            return urgent
        self.known, self.view = reply, reply.view or self.view
        self._unacked = {seq: rows for seq, rows in self._unacked.items() if seq > reply.seq}
        self.checkpoint.hear(reply.checkpoint)
        self.snapshot.hear(reply.snapshot)
        if self.queue is not None:
            self.queue.drop_own()
            if reply.revoke is not None and reply.revoke.number != self._last_revoked:
                self._give_back(self.queue, reply.revoke)
                urgent = True
        return urgent

    def _give_back(self, queue: Worklist, demand: Revocation) -> None:
        self._last_revoked = demand.number
        given = queue.give_back(demand.epoch, demand.utterances)
        self._announced -= {assignment.key for assignment in given}
        self.outbox.give_back(demand.number, given)

    # --- outages

    def lose_coordinator(self) -> None:
        """End training, because the coordinator has not answered for too long."""
        self.known = self.known.model_copy(update={"finish": COORDINATOR_LOST})

    def own_share(self, node: int) -> tuple[int, Rows] | None:
        """This node's share of the rows that were free when the outage started, if it has nothing else to do."""
        known, nodes = self.known, self.view.nodes
        if self.queue is None or self.planner is None or len(self.queue) or known.finish:
            return None
        if not known.running or node not in nodes:
            return None
        return self.queue.own_share(known.progress.closed, known.pools, nodes.index(node), len(nodes))
