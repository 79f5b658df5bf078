"""The coordinator's decisions: who is in the ring, who trains what, when to checkpoint, when training is over.

It owns no socket: `handle` answers a request, `tick` does what depends on time. Every change of the ledger is an event,
which the server commits before it sends the answer.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.coordinator.admission import Admission, NodeNumbers
from training.coordinator.checkpoints import CheckpointRounds
from training.coordinator.core import Core
from training.coordinator.evaluations import Evaluations
from training.coordinator.journal import Position, read_on
from training.coordinator.leasing import Leasing
from training.coordinator.ledger import Ledger
from training.coordinator.membership import MemberState
from training.coordinator.messages import (
    AnyRequest,
    Done,
    EvaluatedReply,
    EvaluatedRequest,
    EvaluationsReply,
    EvaluationsRequest,
    FinishedRequest,
    Heartbeat,
    HeartbeatReply,
    JobReply,
    JobRequest,
    JoinReply,
    JoinRequest,
    JournalReply,
    JournalRequest,
    JsonObject,
    LeaveRequest,
    NumberRequest,
    RendezvousRequest,
    ReturnedBatch,
    SpoolPortion,
    StartedBatch,
    StatusReply,
    StatusRequest,
    StopRequest,
    TrainedBatch,
)
from training.coordinator.rendezvous import RendezvousService
from training.processes.message import Message

log = logging.getLogger(__name__)

FINAL_S = 90.0
"""Training ends without its last checkpoint if that takes longer."""
NOTE_S = 1.0
"""Interval at which the training time is recorded."""


class Coordinator:
    """Decides what nodes do; no I/O.

    Args:
        core: Job, ledger, clocks.
        fresh: Start a session, from the newest checkpoint or from scratch; else continue from the ledger.

    Raises:
        CoordinatorError: If the newest checkpoint belongs to another run.
    """

    def __init__(self, core: Core, fresh: bool) -> None:
        self.core, self.ledger, self.settings = core, core.ledger, core.settings
        self.admission = Admission(core)
        self.rounds = CheckpointRounds(core.settings, core.ledger, core.output)
        rendezvous = RendezvousService(core.settings, core.clock)
        self._handlers: dict[type[Message], Callable[[Any], Message]] = {
            NumberRequest: NodeNumbers(core.ledger, core.clock).answer,
            JoinRequest: self._join,
            Heartbeat: self._heartbeat,
            LeaveRequest: self._leave,
            RendezvousRequest: rendezvous.answer,
            JobRequest: self._job,
            StatusRequest: self._status,
            JournalRequest: self._journal,
            StopRequest: self._stop,
            EvaluationsRequest: self._ready_evaluations,
            EvaluatedRequest: self._evaluated,
            FinishedRequest: self._finished,
        }
        if fresh:
            self.admission.begin_session()
        elif self.ledger.values.running and self.ledger.values.at and not self.ledger.values.finish:
            # the nodes kept training while the coordinator was down
            core.note_elapsed(max(0.0, core.wall() - self.ledger.values.at))
        self._enter_session()

    def _enter_session(self) -> None:
        """Reset what belongs to the previous session; after a restart, every member gets its full timeout."""
        now = self.core.clock()
        self._session = self.ledger.values.session
        self.rounds.reset()
        self.evaluations = Evaluations(self.ledger)
        self.leasing = Leasing(self.core)
        self._deadlines = dict.fromkeys(self.ledger.states, now + self.settings.dead_after_s)
        self._last = self._noted = now
        self._first_join: float | None = now if self.ledger.states else None
        self._final: float | None = None
        self._final_due = False

    def handle(self, request: AnyRequest) -> Message:
        """Answer a request.

        Raises:
            CoordinatorError: If the request cannot be granted; the message goes to the sender.
        """
        return self._handlers[type(request)](request)

    def _join(self, request: JoinRequest) -> JoinReply:
        reply = self.admission.join(request)
        if self.ledger.values.session != self._session:
            self._enter_session()
        self._alive(reply.incarnation)
        if self._first_join is None:
            self._first_join = self.core.clock()
        return reply

    def _alive(self, name: str) -> None:
        self._deadlines[name] = self.core.clock() + self.settings.dead_after_s

    def _heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        name = beat.incarnation
        state = self.ledger.states.get(name)
        if state is None:
            return HeartbeatReply(dropped=True, finish=self.ledger.values.finish)
        self._alive(name)
        self._record(state, beat)
        self.tick()
        if name not in self.ledger.states:
            return HeartbeatReply(dropped=True, finish=self.ledger.values.finish)
        have = set(beat.have)
        if beat.empty:
            self.leasing.reclaim(name, have)
        # returned rows are for the node that ran out of work, not for the one that returned them
        if beat.want and not beat.returned and not self._ending():
            self.leasing.give_work(state, have)
        return self._reply(state, beat)

    def _record(self, state: MemberState, beat: Heartbeat) -> None:
        """Record everything that a heartbeat reports; repeated reports are ignored."""
        core, name = self.core, state.member.incarnation
        entries: list[StartedBatch | ReturnedBatch | TrainedBatch] = [*beat.started, *beat.returned, *beat.reports]
        for entry in entries:
            core.check_rows(entry.epoch, entry.rows)
        if beat.ready and not state.ready:
            core.do("ready", incarnation=name)
        for batch in beat.started:
            if batch.own:
                core.do("adopt", incarnation=name, epoch=batch.epoch, rows=batch.rows)
            core.do("begin", incarnation=name, epoch=batch.epoch, rows=batch.rows)
        for report in beat.reports:
            if report.seq > state.seq:
                core.do("report", incarnation=name, **report.model_dump())
                self.leasing.report(name, core.check_rows(report.epoch, report.rows))
        for returned in beat.returned:
            core.do("back", **returned.model_dump())
        self.leasing.answered(name, beat.answered, len(beat.returned))
        for epoch in beat.snapshots:
            if state.member.node not in self.ledger.books.snapshots.get(str(epoch), []):
                core.do("snapshot", node=state.member.node, epoch=epoch)
        for number, record in beat.records:
            self.rounds.answer(name, number, record.model_dump())
        for portion in beat.spools:
            self._record_lines(portion)

    def _record_lines(self, portion: SpoolPortion) -> None:
        """Accept journal lines of a node, each exactly once: only those that follow the bytes already received."""
        if portion.offset == self.ledger.books.spools.get(portion.name, 0):
            self.core.do("spool", name=portion.name, offset=portion.end)
            lines = [line for line in portion.lines if isinstance(line, dict) and isinstance(line.get("kind"), str)]
            self.ledger.lines += lines

    def _reply(self, state: MemberState, beat: Heartbeat) -> HeartbeatReply:
        name, ledger, view = state.member.incarnation, self.ledger, self.ledger.view()
        first = ledger.values.closed
        return HeartbeatReply(
            seq=state.seq,
            view=None if view.number == beat.view else view,
            progress=replace(ledger.progress(), elapsed=ledger.values.elapsed + self._unnoted()),
            running=ledger.values.running,
            pools={n: ledger.epochs[n].position for n in range(first, first + 2) if n in ledger.epochs},
            leases=tuple(self.leasing.open_leases(name, set(beat.have))),
            revoke=self.leasing.asked(name),
            checkpoint=self.rounds.asked(name),
            snapshot=self.evaluations.wanted(state.member.node),
            spools={portion.name: ledger.books.spools.get(portion.name, 0) for portion in beat.spools},
            finish=ledger.values.finish,
        )

    def _leave(self, request: LeaveRequest) -> Done:
        name, failed = request.incarnation, request.op == "fail"
        state = self.ledger.states.get(name)
        if state is not None:
            why = f"failed: {request.reason}" if failed else "left"
            log.info("node %d %s", state.member.node, why)
            self.core.do("drop", incarnation=name, why=why, failure=request.reason if failed else "")
            if failed and not self.ledger.states and not self.ledger.values.finish:
                self.core.set(finish=why)
        return Done()

    def _journal(self, request: JournalRequest) -> JournalReply:
        return journal_portion(self.settings.journal, request.offset)

    def _stop(self, _: StopRequest) -> Done:
        if not self.ledger.values.stopping:
            self.core.set(stopping=True)
        return Done()

    def _job(self, _: JobRequest) -> JobReply:
        return JobReply(job=self.settings.job)

    def _ready_evaluations(self, _: EvaluationsRequest) -> EvaluationsReply:
        ready = self.evaluations.ready(self.core.clock())
        return EvaluationsReply(ready=tuple(ready), finish=self.ledger.values.finish)

    def _evaluated(self, request: EvaluatedRequest) -> EvaluatedReply:
        number, result = request.epoch, {**request.result, "epoch": request.epoch}
        history = self.ledger.books.history
        if all(entry["epoch"] != number for entry in history):
            self.core.do("evaluated", result=result, line=self.evaluations.journal_line(number, result))
        return EvaluatedReply(history=tuple(history))

    def _finished(self, request: FinishedRequest) -> Done:
        if self.ledger.books.result is None:
            result = request.result.model_dump()
            step = self.ledger.totals.steps if request.result.step is None else request.result.step
            line = {"kind": "end", "step": step}
            line |= {f"valid_{name}": value for name, value in request.result.valid.items()}
            self.core.do("result", result=result, line=line)
        return Done()

    def _status(self, _: StatusRequest) -> StatusReply:
        return status(self.ledger, self.settings.nodes, self.rounds, len(self.evaluations.pending()))

    # --- time

    def tick(self) -> None:
        """Handle what depends on time: lost nodes, the start, checkpoints, the end."""
        now = self.core.clock()
        gap, self._last = now - self._last, now
        if gap > self.settings.dead_after_s / 2:
            # this process was suspended, not the nodes: their heartbeats are still queued
            log.warning("the coordinator was suspended for %.1f s", gap)
            self._deadlines = {name: deadline + gap for name, deadline in self._deadlines.items()}
        values = self.ledger.values
        if values.running and not values.finish and now - self._noted >= NOTE_S:
            self.core.note_elapsed(now - self._noted if self.ledger.states else 0.0)
        if now - self._noted >= NOTE_S or not values.running:
            self._noted = now
        self._drop_lost(now)
        self._begin_training(now)
        self.rounds.tick(now)
        if self._final is None and self.rounds.due() and not values.finish:  # else training might never end
            self._begin_checkpoint()
        self._end_training(now)

    def _unnoted(self) -> float:
        """Seconds of training since the last record of the elapsed time."""
        return self.core.clock() - self._noted if self.ledger.values.running and not self.ledger.values.finish else 0.0

    def _drop_lost(self, now: float) -> None:
        for name, state in list(self.ledger.states.items()):
            if now > self._deadlines.get(name, now):
                log.warning("node %d is lost", state.member.node)
                why = f"no heartbeat for {self.settings.dead_after_s:g} s"
                self.core.do("drop", incarnation=name, why=why)
        self._deadlines = {name: at for name, at in self._deadlines.items() if name in self.ledger.states}

    def _begin_training(self, now: float) -> None:
        """Start leasing once all nodes are ready, or at least one node after `start_patience_s`."""
        if self.ledger.values.running or self.ledger.values.finish:
            return
        ready = [name for name, state in self.ledger.states.items() if state.ready]
        patient = self._first_join is not None and now - self._first_join < self.settings.start_patience_s
        if not ready or (len(ready) < self.settings.nodes and patient):
            return
        self.core.do("running")
        if len(ready) < self.settings.nodes:
            log.warning("training starts with %d of %d nodes", len(ready), self.settings.nodes)
            # by the time they are ready, their weights would be older than those of all other nodes
            for name in self.ledger.states.keys() - {*ready}:
                self.core.do("drop", incarnation=name, why="it was not ready when training started")
            number, nodes = self.ledger.values.view, list(self.ledger.view().nodes)
            line = {"kind": "view", "number": number, "nodes": nodes, "joined": [], "left": {}, "step": 0}
            self.ledger.lines.append({**line, "wanted": self.settings.nodes, "elapsed": self.ledger.values.elapsed})

    def _begin_checkpoint(self) -> None:
        if not self.settings.checkpoint_steps:
            return
        number = self.ledger.values.checkpoint + 1
        self.core.set(checkpoint=number)
        self.rounds.begin(number, self.core.clock())

    def _ending(self) -> str:
        """Why training should end once the last checkpoint is written, or ""."""
        values, minutes, utterances = self.ledger.values, self.settings.max_minutes, self.settings.max_utterances
        if self.ledger.complete:
            return "done"
        if values.stopping:
            return "stop"
        return "limit" if 0 < minutes * 60 <= values.elapsed or 0 < utterances <= self.ledger.trained else ""

    def _end_training(self, now: float) -> None:
        why, ready = self._ending(), any(state.ready for state in self.ledger.states.values())
        if not why or self.ledger.values.finish or (why != "stop" and not ready):
            return
        if self._final is None:
            # nodes may have made steps that are not reported yet, except at the end of the last epoch
            self._final, self._final_due = now + FINAL_S, why != "done" or not self.rounds.fresh
        if ready and now < self._final:
            if self.rounds.current is not None:
                return
            if self._final_due:
                self._final_due = False
                self._begin_checkpoint()
                return
        log.info("training ends: %s", why)
        self.core.set(finish=why, last=self.evaluations.last())


# --- read-only views: portions of the journal, and the status


def journal_portion(path: Path, offset: int) -> JournalReply:
    """Read complete lines of the journal.

    Args:
        path: The journal.
        offset: Bytes that the reader already has; negative means near the end. An offset beyond the end means that the
            journal was replaced, and reads from its start.
    """
    position, lines = read_on(path, Position(offset))
    text = lines.decode("utf-8", errors="replace")
    return JournalReply(offset=position.offset - len(lines), end=position.offset, text=text)


def status(ledger: Ledger, wanted: int, rounds: CheckpointRounds, to_evaluate: int) -> StatusReply:
    """The state of the training.

    Args:
        ledger: The state.
        wanted: Number of nodes of the job.
        rounds: Checkpoint rounds.
        to_evaluate: Number of epochs that are over and not evaluated.
    """
    values = ledger.values
    members = [
        {"node": state.member.node, "ready": state.ready, "step": state.step, "incarnation": name} | _held(ledger, name)
        for name, state in ledger.states.items()
    ]
    names = ("session", "running", "stopping", "finish", "failure", "view", "restored")
    return StatusReply(
        **{name: getattr(values, name) for name in names},
        members=tuple(sorted(members, key=lambda member: int(member["node"]))),
        wanted=wanted,
        pool=_unleased(ledger),
        progress=ledger.progress(),
        totals=_totals(ledger),
        to_evaluate=to_evaluate,
        checkpoint=rounds.current.number if rounds.current else None,
        history=tuple(ledger.books.history),
        result=ledger.books.result,
    )


def _held(ledger: Ledger, incarnation: str) -> JsonObject:
    """Number of a node's leases, and of the leased utterances that it has not trained."""
    leases = [lease for epoch in ledger.epochs.values() for lease in epoch.leases.values()]
    mine = [lease.left for lease in leases if lease.incarnation == incarnation]
    return {"leases": len(mine), "leased": sum(mine)}


def _unleased(ledger: Ledger) -> int:
    """Number of utterances of the current epoch that are neither trained nor leased."""
    epoch = ledger.epochs.get(ledger.values.closed)
    if epoch is None:
        return 0 if ledger.complete else ledger.size
    return len(epoch) - epoch.count - sum(lease.left for lease in epoch.leases.values())


def _totals(ledger: Ledger) -> JsonObject:
    """Counters of the whole training, for display and for its result."""
    totals = ledger.totals
    return {
        "step": totals.steps,
        "epoch": ledger.current,
        "utterances": totals.utterances,
        "audio_seconds": totals.seconds,
        "unalignable": totals.unalignable,
        "skipped": totals.skipped,
        "unreadable": totals.unreadable,
        "repeated": ledger.repeated,
        "elapsed": ledger.values.elapsed,
    }
