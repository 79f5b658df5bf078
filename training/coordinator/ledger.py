"""The coordinator's state: members, epochs, counts. Only events change it, so replaying the event log restores it.

`Ledger.apply` is the only way to change it; its result depends only on the event and the previous state. Journal lines
that an event causes are collected in `lines`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.coordinator.epochs import ClosedEpoch, Epoch, ShardMap, Totals
from training.coordinator.membership import Member, MemberState, View
from training.coordinator.messages import JsonObject, Progress
from training.coordinator.packing import Rows, unpack_rows

Event = dict[str, Any]


@dataclass
class Accepted:
    """A report that arrived during a checkpoint round: the checkpoint may not contain it."""

    incarnation: str
    seq: int
    epoch: int
    rows: Rows
    """Rows that no node had reported before."""
    counts: JsonObject


@dataclass
class Counters:
    """The ledger's scalar values."""

    run: str = ""
    """Identity of the run."""
    session: str = ""
    """Name of the session, which is one start or resume."""
    view: int = 0
    """Number of the current view."""
    leases: int = 0
    """Number of the last lease."""
    closed: int = 0
    """Closed epochs, which is also the number of the current epoch (0 is the first)."""
    running: bool = False
    """Whether leases are granted."""
    stopping: bool = False
    """Whether a stop was requested."""
    finish: str = ""
    """Why training has ended; "" while it runs."""
    last: int = 0
    """The last epoch (1 is the first) to evaluate, fixed when training ends; later reports do not add another."""
    elapsed: float = 0.0
    """Seconds of training, over all sessions."""
    at: float = 0.0
    """Wall-clock time when `elapsed` was recorded."""
    checkpoint: int = 0
    """Number of the last checkpoint that was started."""
    restored: int = 0
    """Number of the checkpoint from which this session started; 0 for none."""
    failure: str = ""
    """Reason that the last failed node gave."""


@dataclass
class Books:
    """The ledger's collections."""

    steps: dict[str, int] = field(default_factory=dict)
    """Local steps by node, of members and former members."""
    records: list[JsonObject] = field(default_factory=list)
    """Records of the checkpoint from which this session started."""
    snapshots: dict[str, list[int]] = field(default_factory=dict)
    """Nodes that have written their replica, by epoch (1 is the first)."""
    awaited: dict[str, list[str]] = field(default_factory=dict)
    """Incarnations that had weights when an epoch (1 is the first) closed."""
    history: list[JsonObject] = field(default_factory=list)
    """Results of evaluations, in order."""
    spools: dict[str, int] = field(default_factory=dict)
    """Received bytes of the nodes' spool files, by file name."""
    former: list[str] = field(default_factory=list)
    """Incarnations that had weights when they were dropped."""
    result: JsonObject | None = None
    """The final result."""
    data: JsonObject | None = None
    """`counts` and `epochs` of a data set that learners have named; None for one that has an index."""


Names = Callable[[int, Sequence[int]], list[str]]
"""(epoch, rows) -> ids."""


class Ledger:
    """State of a training.

    Args:
        shards: The index's shards.
        names: Returns the ids of an epoch's rows, for the list of repeated ones.
        seed: The run's seed.
        epochs: Number of epochs to train.
    """

    def __init__(self, shards: ShardMap, names: Names, seed: int, epochs: int) -> None:
        self.shards, self.names, self.seed, self.total = shards, names, seed, epochs
        self.values, self.books, self.totals = Counters(), Books(), Totals()
        self.states: dict[str, MemberState] = {}
        self.epochs: dict[int, Epoch] = {}
        self.closed: dict[int, ClosedEpoch] = {}
        self.lines: list[JsonObject] = []
        self.accepted: list[Accepted] | None = None
        """Reports since the current checkpoint round started; None without one."""

    # --- questions

    @property
    def size(self) -> int:
        """Utterances in an epoch."""
        return len(self.shards)

    @property
    def trained(self) -> int:
        """Utterances trained in all epochs, each counted once per epoch."""
        return self.values.closed * self.size + sum(epoch.count for epoch in self.epochs.values())

    @property
    def repeated(self) -> int:
        """Utterances that were, or may have been, trained more than once in an epoch."""
        closed = sum(part.repeats.count for part in self.closed.values())
        return closed + sum(part.repeats.count for part in self.epochs.values())

    @property
    def complete(self) -> bool:
        """Whether all epochs are closed."""
        return self.values.closed >= self.total

    @property
    def current(self) -> int:
        """The epoch (1 is the first) that training is in; once it has ended, the last one in which a step was made."""
        values = self.values
        return values.last if values.finish else values.closed + int(bool(self.epochs) and not self.complete)

    def view(self) -> View:
        """The current view of the ring."""
        members = sorted((state.member for state in self.states.values()), key=lambda member: member.node)
        return View(self.values.view, tuple(members))

    def state_of(self, node: int) -> MemberState | None:
        """The member with that node number, or None."""
        return next((state for state in self.states.values() if state.member.node == node), None)

    def progress(self) -> Progress:
        """How far training is."""
        values = self.values
        new = sum(not state.ready for state in self.states.values())
        return Progress(self.trained, self.size, self.total, values.closed, len(self.states), values.elapsed, new)

    def open_epoch(self, number: int) -> Epoch:
        """State of an epoch; opens the epoch if it is not open yet."""
        if number not in self.epochs:
            self.epochs[number] = Epoch(number, self.shards, self.seed)
        return self.epochs[number]

    # --- events

    def apply(self, event: Event) -> Any:
        """Apply an event; returns the result of the event's kind (for `lease`, the lease)."""
        return getattr(self, f"_on_{event['event']}")(event)

    def _on_join(self, event: Event) -> None:
        node = int(event["node"])
        left = {}
        if (old := self.state_of(node)) is not None:
            left[str(node)] = "it joined again"
            self._remove(old)
        member = Member(node, event["incarnation"], tuple(event["endpoints"]))
        step = self.books.steps.setdefault(str(node), 0)
        more = {"begins": event.get("begins", False), "model": event.get("model")}
        self.states[member.incarnation] = MemberState(member, step=step, since=self.values.closed, **more)
        self._new_view([node], left)

    def _on_drop(self, event: Event) -> None:
        if (state := self.states.get(event["incarnation"])) is not None:
            self._remove(state)
            self._new_view([], {str(state.member.node): event["why"]})
            self.values.failure = event.get("failure") or self.values.failure

    def _remove(self, state: MemberState) -> None:
        for epoch in self.epochs.values():
            epoch.lose(state.member.incarnation)
        if state.ready:
            self.books.former = [*self.books.former[-999:], state.member.incarnation]
        del self.states[state.member.incarnation]

    def _new_view(self, joined: list[int], left: dict[str, str]) -> None:
        self.values.view += 1
        view = self.view()
        line = {"kind": "view", "number": view.number, "nodes": list(view.nodes), "joined": joined, "left": left}
        self.lines.append({**line, "step": self.totals.steps, "elapsed": self.values.elapsed})

    def _on_data(self, event: Event) -> None:
        self.books.data = {"counts": event["counts"], "epochs": event["epochs"]}
        self._use_data()

    def _use_data(self) -> None:
        if (data := self.books.data) is not None:
            self.shards, self.total = ShardMap.from_counts(data["counts"]), int(data["epochs"])

    def _on_ready(self, event: Event) -> None:
        self.states[event["incarnation"]].ready = True

    def _on_running(self, _: Event) -> None:
        self.values.running = True

    def _on_lease(self, event: Event) -> Any:
        self.values.leases += 1
        epoch = self.open_epoch(event["epoch"])
        return epoch.grant(self.values.leases, event["incarnation"], event["live"])

    def _on_adopt(self, event: Event) -> None:
        self.values.leases += 1
        if event["epoch"] >= self.values.closed:  # a repeated request may come when its rows have closed the epoch
            epoch = self.open_epoch(event["epoch"])
            epoch.adopt(self.values.leases, event["incarnation"], unpack_rows(event["rows"]))

    def _on_begin(self, event: Event) -> None:
        if event["epoch"] in self.epochs:
            self.epochs[event["epoch"]].begin(event["incarnation"], unpack_rows(event["rows"]))

    def _on_back(self, event: Event) -> None:
        if event["epoch"] in self.epochs:
            self.epochs[event["epoch"]].give_back(event["lease"], unpack_rows(event["rows"]))

    def _on_report(self, event: Event) -> None:
        state, number, rows = self.states[event["incarnation"]], int(event["epoch"]), unpack_rows(event["rows"])
        state.seq = int(event["seq"])
        state.step += 1
        self.books.steps[str(state.member.node)] = state.step
        counts = {**event["counts"], "steps": 1}
        self.totals.add(counts)
        if number < self.values.closed:
            self._repeat(state, number, rows, counts)
            return
        epoch = self.open_epoch(number)
        epoch.totals.add(counts)
        new = epoch.train(rows)
        if self.accepted is not None:
            self.accepted.append(Accepted(state.member.incarnation, state.seq, number, new, counts))
        while (first := self.epochs.get(self.values.closed)) is not None and first.done:
            self._close(first)

    def _repeat(self, state: MemberState, number: int, rows: Rows, counts: JsonObject) -> None:
        """Handle a report for a closed epoch: another node had trained its rows in the meantime."""
        closed = self.closed[number]
        closed.totals.add(counts)
        closed.repeats.add(rows)
        if self.accepted is not None:
            self.accepted.append(Accepted(state.member.incarnation, state.seq, number, rows[:0], counts))
        self.lines.append(self._epoch_line(number))

    def _close(self, epoch: Epoch) -> None:
        number = epoch.number
        self.values.closed = number + 1
        self.closed[number] = ClosedEpoch(epoch.repeats, epoch.totals, self.values.elapsed, self.totals.steps)
        del self.epochs[number]
        self.books.awaited[str(number + 1)] = [name for name, state in self.states.items() if state.ready]
        self.lines.append(self._epoch_line(number))

    def _epoch_line(self, number: int) -> JsonObject:
        closed = self.closed[number]
        unreadable = min(closed.totals.unreadable, self.size)
        return {
            "kind": "epoch",
            "epoch": number + 1,
            "step": closed.step,
            "utterances": self.size - unreadable,
            "unreadable": unreadable,
            "index": self.size,
            "repeated": closed.repeats.count,
            "repeated_ids": self.names(number, closed.repeats.rows),
            "nodes": len(self.states),
            "elapsed": closed.elapsed,
        }

    def _on_snapshot(self, event: Event) -> None:
        nodes = self.books.snapshots.setdefault(str(event["epoch"]), [])
        if event["node"] not in nodes:
            nodes.append(event["node"])

    def _on_evaluated(self, event: Event) -> None:
        self.books.history.append(event["result"])
        self.lines.append(event["line"])

    def _on_result(self, event: Event) -> None:
        self.books.result = event["result"]
        self.lines.append(event["line"])

    def _on_spool(self, event: Event) -> None:
        self.books.spools[event["name"]] = event["offset"]

    def _on_value(self, event: Event) -> None:
        for name, value in event["values"].items():
            setattr(self.values, name, value)

    def _on_reset(self, event: Event) -> None:
        self.load(event["state"])
        self.accepted = None

    # --- serialization

    def to_dict(self) -> JsonObject:
        """JSON representation."""
        return {
            "values": vars(self.values).copy(),
            "books": vars(self.books).copy(),
            "totals": vars(self.totals).copy(),
            "seats": [state.to_list() for state in self.states.values()],
            "epochs": [epoch.to_dict() for epoch in self.epochs.values()],
            "closed": {str(number): closed.to_dict() for number, closed in self.closed.items()},
        }

    def load(self, value: JsonObject) -> None:
        """Restore the state from what `to_dict` returned."""
        self.values, self.books = Counters(**value["values"]), Books(**value["books"])
        self._use_data()
        self.totals = Totals(**value["totals"])
        self.states = {state.member.incarnation: state for state in map(MemberState.from_list, value["seats"])}
        epochs = [Epoch.from_dict(part, self.shards, self.seed) for part in value["epochs"]]
        self.epochs = {epoch.number: epoch for epoch in epochs}
        self.closed = {int(number): ClosedEpoch.from_dict(part) for number, part in value["closed"].items()}
