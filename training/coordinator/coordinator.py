"""The coordinator's decisions: who is in the ring, who trains what, when to checkpoint, when training is over.

It owns no socket: `handle` answers a request, `tick` does what depends on time. Every change of the ledger is an event,
which the server commits before it sends the answer.
"""

import logging

from training.coordinator.admission import Admission
from training.coordinator.checkpoint_rounds import CheckpointRounds
from training.coordinator.core import Core
from training.coordinator.evaluations import Evaluations
from training.coordinator.leasing import Leasing
from training.coordinator.ledger import MemberState
from training.coordinator.messages import CoordinatorError, Message
from training.coordinator.rendezvous import Meetings
from training.coordinator.views import held, journal_portion, unleased

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
        self.meetings = Meetings(core.settings, core.clock)
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

    def handle(self, message: Message) -> Message:
        """Answer a request.

        Raises:
            CoordinatorError: If the request is invalid; the message goes to the sender.
        """
        handler = {
            "join": self._join,
            "beat": self._beat,
            "leave": self._leave,
            "fail": self._leave,
            "meet": self.meetings.meet,
            "job": self._job,
            "status": self._status,
            "journal": self._journal,
            "stop": self._stop,
            "evaluations": self._ready_evaluations,
            "evaluated": self._evaluated,
            "finished": self._finished,
        }.get(str(message.get("op")))
        if handler is None:
            raise CoordinatorError(
                f"unknown request {message.get('op')!r}: do coordinator and node run the same version?"
            )
        try:
            return handler(message)
        except CoordinatorError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CoordinatorError(f"malformed request {message.get('op')!r} ({error!r})") from error

    def _join(self, message: Message) -> Message:
        reply = self.admission.join(message)
        if self.ledger.values.session != self._session:
            self._enter_session()
        self._alive(reply["incarnation"])
        if self._first_join is None:
            self._first_join = self.core.clock()
        return reply

    def _alive(self, name: str) -> None:
        self._deadlines[name] = self.core.clock() + self.settings.dead_after_s

    def _beat(self, message: Message) -> Message:
        name = str(message["incarnation"])
        state = self.ledger.states.get(name)
        if state is None:
            return {"dropped": True, "finish": self.ledger.values.finish}
        self._alive(name)
        if message["ready"] and not state.ready:
            self.core.do("ready", incarnation=name)
        self._take_news(state, message)
        self.tick()
        if name not in self.ledger.states:
            return {"dropped": True, "finish": self.ledger.values.finish}
        if message["empty"]:
            self.leasing.reclaim(name, set(message["have"]))
        if message["want"] and not self._ending():
            self.leasing.give_work(state, set(message["have"]))
        return self._tell(state, message)

    def _take_news(self, state: MemberState, message: Message) -> None:
        """Process everything that a heartbeat reports; repeated reports are ignored."""
        core, name = self.core, state.member.incarnation
        for entry in [*message["begun"], *message["back"]]:
            core.check_rows(entry)
        for entry in message["reports"]:
            core.check_report(entry)
        for _, record in message["records"]:
            core.check_record(record)
        for entry in message["begun"]:
            if entry["own"]:
                core.do("adopt", incarnation=name, epoch=entry["epoch"], rows=entry["rows"])
            core.do("begin", incarnation=name, epoch=entry["epoch"], rows=entry["rows"])
        for entry in message["reports"]:
            if entry["seq"] > state.seq:
                core.do("report", incarnation=name, **entry)
                self.leasing.report(name, core.check_rows(entry))
        for entry in message["back"]:
            core.do("back", epoch=entry["epoch"], lease=int(entry["lease"]), rows=entry["rows"])
        self.leasing.answered(name, int(message["answered"]), len(message["back"]))
        for epoch in message["snapshots"]:
            if state.member.node not in self.ledger.books.snapshots.get(str(epoch), []):
                core.do("snapshot", node=state.member.node, epoch=int(epoch))
        for number, record in message["records"]:
            self.rounds.answer(name, int(number), record)
        for spool in message["spools"]:
            self._take_lines(spool)

    def _take_lines(self, spool: Message) -> None:
        """Accept journal lines of a node, each exactly once: only those that follow the bytes already received."""
        if spool["offset"] != self.ledger.books.spools.get(spool["name"], 0):
            return
        lines = [line for line in spool["lines"] if isinstance(line, dict) and isinstance(line.get("kind"), str)]
        self.core.do("spool", name=str(spool["name"]), offset=int(spool["end"]))
        self.ledger.lines += lines

    def _tell(self, state: MemberState, message: Message) -> Message:
        """The answer to a heartbeat."""
        name, ledger = state.member.incarnation, self.ledger
        view = ledger.view()
        first = ledger.values.closed
        pools = {str(n): ledger.epochs[n].position for n in range(first, first + 2) if n in ledger.epochs}
        return {
            "dropped": False,
            "seq": state.seq,
            "session": ledger.values.session,
            "view": None if view.number == message["view"] else view.to_dict(),
            "progress": {**ledger.progress(), "elapsed": ledger.values.elapsed + self._unnoted()},
            "running": ledger.values.running,
            "pools": pools,
            "leases": self.leasing.open_leases(name, set(message["have"])),
            "revoke": self.leasing.asked(name),
            "checkpoint": self.rounds.asked(name),
            "snapshot": self.evaluations.wanted(state.member.node),
            "spools": {spool["name"]: ledger.books.spools.get(spool["name"], 0) for spool in message["spools"]},
            "finish": ledger.values.finish,
        }

    def _leave(self, message: Message) -> Message:
        name, failed = str(message["incarnation"]), message["op"] == "fail"
        state = self.ledger.states.get(name)
        if state is not None:
            why = f"failed: {message['reason']}" if failed else "left"
            log.info("node %d %s", state.member.node, why)
            self.core.do("drop", incarnation=name, why=why, failure=str(message["reason"]) if failed else "")
            if failed and not self.ledger.states and not self.ledger.values.finish:
                self.core.set(finish=why)
        return {}

    def _journal(self, message: Message) -> Message:
        return journal_portion(self.settings.journal, int(message["offset"]))

    def _stop(self, _: Message) -> Message:
        if not self.ledger.values.stopping:
            self.core.set(stopping=True)
        return {}

    def _job(self, _: Message) -> Message:
        return {"job": self.settings.job}

    def _ready_evaluations(self, _: Message) -> Message:
        return {"ready": self.evaluations.ready(self.core.clock()), "finish": self.ledger.values.finish}

    def _evaluated(self, message: Message) -> Message:
        number, result = int(message["epoch"]), {**message["result"], "epoch": int(message["epoch"])}
        history = self.ledger.books.history
        if all(entry["epoch"] != number for entry in history):
            self.core.do("evaluated", result=result, line=self.evaluations.journal_line(number, result))
        return {"history": history}

    def _finished(self, message: Message) -> Message:
        result = dict(message["result"])
        if self.ledger.books.result is None:
            valid = {f"valid_{name}": value for name, value in dict(result.get("valid", {})).items()}
            line = {"kind": "end", "step": result.get("step", self.ledger.totals.steps), **valid}
            self.core.do("result", result=result, line=line)
        return {}

    def _status(self, _: Message) -> Message:
        ledger, values = self.ledger, self.ledger.values
        members = [
            {
                "node": state.member.node,
                "ready": state.ready,
                "step": state.step,
                "incarnation": name,
                **held(ledger, name),
            }
            for name, state in ledger.states.items()
        ]
        current = self.rounds.current
        return {
            "session": values.session,
            "running": values.running,
            "stopping": values.stopping,
            "finish": values.finish,
            "failure": values.failure,
            "view": values.view,
            "members": sorted(members, key=lambda member: int(str(member["node"]))),
            "wanted": self.settings.nodes,
            "pool": unleased(ledger),
            "progress": ledger.progress(),
            "totals": self._totals(),
            "to_evaluate": len(self.evaluations.pending()),
            "restored": values.restored,
            "checkpoint": current.number if current else None,
            "history": ledger.books.history,
            "result": ledger.books.result,
        }

    def _totals(self) -> Message:
        """Counters of the whole training, for display and for its result."""
        ledger, totals = self.ledger, self.ledger.totals
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
        number = self.ledger.values.checkpoint + 1
        self.core.set(checkpoint=number)
        self.rounds.begin(number, self.core.clock())

    def _ending(self) -> str:
        """Why training should end once the last checkpoint is written, or ""."""
        values, minutes = self.ledger.values, self.settings.max_minutes
        if self.ledger.complete:
            return "done"
        if values.stopping:
            return "stop"
        return "time" if 0 < minutes * 60 <= values.elapsed else ""

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
