"""Admission of nodes: their numbers, who may join, where their weights come from, and when a new session starts."""

import logging
import secrets
from collections.abc import Callable
from itertools import count

from training.coordinator.checkpoints import discard, find_checkpoint, last_number, restored_state
from training.coordinator.core import Core
from training.coordinator.evaluations import Evaluations
from training.coordinator.ledger import Ledger
from training.coordinator.messages import (
    AveragedModel,
    CoordinatorError,
    JoinReply,
    JoinRequest,
    JsonObject,
    NamedData,
    NumberReply,
    NumberRequest,
    Source,
    checkpoint_folder,
)
from training.coordinator.packing import pack_bits

log = logging.getLogger(__name__)
MAX_NODES = 4096


class Admission:
    """Admits nodes to the ring.

    Args:
        core: What the coordinator's parts share.
    """

    def __init__(self, core: Core) -> None:
        self.core = core

    def begin_session(self, damaged: str = "") -> None:
        """Start a session from the newest complete checkpoint, or from scratch; current members must join again.

        Args:
            damaged: Folder of a checkpoint whose files turned out to be damaged.

        Raises:
            CoordinatorError: If the checkpoint belongs to another run or another index.
        """
        core, ledger = self.core, self.core.ledger
        if damaged:
            log.warning("%s is damaged and is skipped", damaged)
            discard(core.output, int(damaged.rsplit("/", 1)[1]))
        number, document = find_checkpoint(core.output, core.settings.run) or (0, None)
        state = restored_state(ledger, core.settings.run, secrets.token_hex(4), number, document)
        state["values"]["checkpoint"] = max(state["values"]["checkpoint"], last_number(core.output))
        core.do("reset", state=state)
        ledger.lines.append(self._first_line() if document is not None else self._start_line())
        core.compact = True

    def _start_line(self) -> JsonObject:
        return {"kind": "start", "step": 0, "run": self.core.settings.run}

    def _first_line(self) -> JsonObject:
        ledger, ranks = self.core.ledger, range(self.core.settings.learners_per_node)
        steps = {f"{node}.{rank}": step for node, step in ledger.books.steps.items() for rank in ranks}
        return {
            "kind": "resume",
            "step": ledger.totals.steps,
            "epoch": ledger.values.closed,
            "steps": steps,
            "checkpoint": checkpoint_folder(ledger.values.restored),
            "elapsed": ledger.values.elapsed,
        }

    def join(self, request: JoinRequest) -> JoinReply:
        """Admit a node.

        Raises:
            CoordinatorError: If its number is taken or out of range, or it names another data set or another model.
        """
        core, ledger = self.core, self.core.ledger
        node, name = request.node, request.incarnation
        if not 0 <= node < MAX_NODES:
            raise CoordinatorError(f"node number {node} is not between 0 and {MAX_NODES - 1}")
        present = ledger.state_of(node)
        if present is not None and request.previous and present.member.incarnation not in (request.previous, name):
            raise CoordinatorError(f"node {node} was taken over by another process: give every node its own number")
        if request.model is not None:
            self._check_model(node, request.model)
        source = self._source(node, request.kept, request.damaged)
        self._name_data(request.data)
        if name not in ledger.states:
            model = request.model.model_dump(mode="json") if request.model else None
            more = {"endpoints": list(request.endpoints), "begins": source != "neighbour", "model": model}
            core.do("join", node=node, incarnation=name, **more)
            log.info("node %d joined as %s, weights: %s", node, name, source)
        if source == "own":
            core.do("ready", incarnation=name)
        return self._welcome(node, name, source)

    def _check_model(self, node: int, model: AveragedModel) -> None:
        """Check that a node can average with the others.

        Raises:
            CoordinatorError: If it averages another model.
        """
        for state in self.core.ledger.states.values():
            if state.model is not None and state.member.node != node:
                if why := AveragedModel.model_validate(state.model).difference(model):
                    raise CoordinatorError(why)
                return

    def _name_data(self, data: NamedData | None) -> None:
        """Set the data set that a node names.

        Raises:
            CoordinatorError: If the training has another data set.
        """
        core, known = self.core, self.core.ledger.books.data
        if data is None:
            if known is not None:
                raise CoordinatorError(
                    f"the ring leases {core.ledger.size} rows, this learner asks for none: call ring.leases with the "
                    "same counts and epochs at all learners"
                )
            return
        wanted = data.model_dump(mode="json")
        if core.settings.train_url:
            raise CoordinatorError(f"this coordinator trains on {core.settings.train_url}, not on data of its nodes")
        if known is None:
            core.do("data", **wanted)
        elif known != wanted:
            rows, shards = core.ledger.size, core.ledger.shards.count
            raise CoordinatorError(
                f"the ring trains {rows} rows in {shards} shards for {core.ledger.total} epochs, this learner names "
                f"{sum(data.counts)} rows in {len(data.counts)} shards for {data.epochs}: give all learners the same "
                "counts and epochs"
            )

    def _source(self, node: int, kept: str, damaged: str) -> Source:
        """Where a joining node's weights come from; starts a new session if no member has weights."""
        ledger, values = self.core.ledger, self.core.ledger.values
        present = [state for state in ledger.states.values() if state.member.node != node]
        others = any(state.ready for state in present)
        if others and (values.running or values.finish):
            return "neighbour"  # even if its checkpoint is damaged, or was deleted because newer ones are complete
        if damaged and values.restored and damaged == checkpoint_folder(values.restored):
            self.begin_session(damaged)
        elif values.finish:
            if values.finish == "done" and Evaluations(ledger).lost():
                self.begin_session()
            elif self._has_kept(node, kept):
                return "own"
        elif values.running:
            if self._has_kept(node, kept):
                return "own"
            self.begin_session()
        elif not self.core.settings.train_url and any(state.begins for state in present):
            return "neighbour"  # without a job, every node has initial weights of its own: all take the first one's
        return "checkpoint" if ledger.values.restored else "initial"

    def _has_kept(self, node: int, kept: str) -> bool:
        """Whether a node has the weights that it had as a member."""
        state = self.core.ledger.state_of(node)
        present = state is not None and state.ready and state.member.incarnation == kept
        return bool(kept) and (present or kept in self.core.ledger.books.former)

    def _welcome(self, node: int, name: str, source: Source) -> JoinReply:
        ledger = self.core.ledger
        resumed = source == "checkpoint"
        records = ledger.books.records if resumed else []
        same = sorted(int(record["node"]) for record in records) == list(range(self.core.settings.nodes))
        own = [record for record in records if same and int(record["node"]) == node]
        return JoinReply(
            incarnation=name,
            session=ledger.values.session,
            view=ledger.view(),
            job=self.core.settings.job,
            progress=ledger.progress(),
            source=source,
            resume=checkpoint_folder(ledger.values.restored) if resumed else None,
            record=own[0] if own else None,
            records=tuple(records),
            step=ledger.states[name].step,
            finish=ledger.values.finish,
            trained={number: pack_bits(epoch.trained) for number, epoch in ledger.epochs.items()},
        )


# --- numbers for nodes that have none


HELD_S = 60.0
"""A node that was given a number must join within this time, or another one may get it."""


class NodeNumbers:
    """Gives each node that asks the lowest number that no node has, or had in this session while there are others.

    Args:
        ledger: The state.
        clock: Monotonic seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        self._held: dict[str, tuple[int, float]] = {}

    def answer(self, request: NumberRequest) -> NumberReply:
        """Answer a node; the same process gets the same number again."""
        now = self._clock()
        self._held = {token: held for token, held in self._held.items() if now - held[1] < HELD_S}
        if request.token not in self._held:
            self._held[request.token] = (self._free(), now)
        return NumberReply(node=self._held[request.token][0])

    def _free(self) -> int:
        taken = {state.member.node for state in self._ledger.states.values()}
        taken |= {node for node, _ in self._held.values()}
        # a former member may have been suspended only, and come back
        former = {int(node) for node in self._ledger.books.steps}
        lowest = next(node for node in count() if node not in taken and node not in former)
        return lowest if lowest < MAX_NODES else next(node for node in count() if node not in taken)
