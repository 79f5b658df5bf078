"""Collectives in virtual time: they start when all live learners have joined."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from training.simulation.clock import Clock
from training.simulation.gradients import Gather
from training.simulation.network import LinkModel
from training.strategies.base import StrategyError
from training.strategies.requests import AllReduce, Mix, Reduced, Ticket
from training.strategies.strategy import JoinPoint


class Participants:
    """The learners that collectives wait for, by node and as a ring."""

    def __init__(self, node_of: Callable[[int], int]) -> None:
        self._node_of = node_of
        self._nodes: dict[int, set[int]] = defaultdict(set)
        self.everybody: set[int] = set()
        self._order: tuple[int, ...] | None = None

    def add(self, rank: int) -> None:
        """Add a learner."""
        self.everybody.add(rank)
        self._nodes[self._node_of(rank)].add(rank)
        self._order = None

    def remove(self, rank: int) -> None:
        """Remove a learner."""
        self.everybody.discard(rank)
        self._nodes[self._node_of(rank)].discard(rank)
        self._order = None

    def of_node(self, node: int) -> set[int]:
        """The learners of a node."""
        return self._nodes[node]

    @property
    def order(self) -> tuple[int, ...]:
        """All learners, ascending."""
        if self._order is None:
            self._order = tuple(sorted(self.everybody))
        return self._order


Finish = Callable[[int, Ticket, Any], None]
"""Learner, its ticket, outcome."""


@dataclass
class PendingCollective:
    """A collective that waits for further learners."""

    tickets: dict[int, Ticket] = field(default_factory=dict)


class VirtualCollectives:
    """All-reduce, all-gather and synchronous mixing in virtual time.

    Args:
        clock: Virtual time.
        links: Model of their cost.
        present: Learners that collectives wait for.
        node_of: Returns the node of a learner.
        finish: Called with each learner's outcome when it arrives.
        moment: Called when newcomers may join: after an outcome has arrived, before and after all have applied it.
    """

    def __init__(
        self,
        clock: Clock,
        links: LinkModel,
        present: "Participants",
        node_of: Callable[[int], int],
        finish: Finish,
        moment: Callable[[JoinPoint], None],
    ) -> None:
        self._clock, self._links, self._present = clock, links, present
        self._node_of, self._finish, self._moment = node_of, finish, moment
        self._meetings: dict[tuple[str, int], PendingCollective] = defaultdict(PendingCollective)
        self._rounds: dict[int, int] = defaultdict(int)
        self._posted: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self._mixing: dict[int, Ticket] = {}
        self._last: dict[int, Tensor] = {}
        self._mixed = 0
        self._underway = 0

    def waiting(self) -> bool:
        """Whether any learner waits for others, or messages of a collective are in flight."""
        return bool(self._underway or self._mixing or any(meeting.tickets for meeting in self._meetings.values()))

    def join(self, rank: int, ticket: Ticket) -> None:
        """Let a learner join a collective."""
        op = ticket.op
        if isinstance(op, Mix):
            self._join_mixing(rank, ticket, op)
            return
        assert isinstance(op, AllReduce | Gather)
        scoped = isinstance(op, AllReduce) and op.scope == "node"
        channel = op.channel if isinstance(op, AllReduce) else "gather"
        key = (channel, self._node_of(rank) if scoped else -1)
        meeting = self._meetings[key]
        if rank in meeting.tickets:
            raise StrategyError(f"learner {rank} is in the collective {channel!r} twice: wait for the first one")
        meeting.tickets[rank] = ticket
        self._look(key)

    def leave(self, rank: int) -> None:
        """Stop waiting for a learner."""
        self._mixing.pop(rank, None)
        for key, meeting in list(self._meetings.items()):
            meeting.tickets.pop(rank, None)
            self._look(key)
        self._mix()

    def _look(self, key: tuple[str, int]) -> None:
        meeting, node = self._meetings[key], key[1]
        wanted = self._present.everybody if node < 0 else self._present.of_node(node)
        if not meeting.tickets or len(meeting.tickets) < len(wanted) or not wanted <= meeting.tickets.keys():
            return
        del self._meetings[key]
        ranks = sorted(meeting.tickets)
        tickets = [meeting.tickets[rank] for rank in ranks]
        if isinstance(tickets[0].op, Gather):
            outcomes, seconds = self._gather(ranks, [ticket.op for ticket in tickets])
        else:
            outcomes, seconds = self._reduce(ranks, [ticket.op for ticket in tickets])
        self._underway += 1
        self._clock.after(seconds, lambda: self._arrived(ranks, tickets, outcomes))

    def _arrived(self, ranks: list[int], tickets: list[Ticket], outcomes: Any) -> None:
        self._underway -= 1
        for ticket in tickets:
            ticket.done, ticket.outcome = True, outcomes
        self._moment("before update")
        for rank, ticket in zip(ranks, tickets, strict=True):
            self._finish(rank, ticket, outcomes)
        self._moment("after update")

    def _reduce(self, ranks: list[int], ops: list[Any]) -> tuple[Reduced, float]:
        total = sum(op.weight for op in ops)
        mean = torch.zeros_like(ops[0].vector)
        for op in ops:
            if op.weight:
                mean.add_(op.vector, alpha=op.weight / total)
        size = max(op.num_bytes for op in ops)
        seconds = self._links.all_reduce(ranks, size) if size and len(ranks) > 1 else 0.0
        return Reduced(mean, total), seconds

    def _gather(self, ranks: list[int], ops: list[Any]) -> tuple[Any, float]:
        seconds = self._links.all_gather(ranks, max(op.num_bytes for op in ops)) if len(ranks) > 1 else 0.0
        return ops[0].combine([op.payload for op in ops]), seconds

    # --- synchronous mixing: a round ends for a learner when its neighbours have posted theirs

    def _join_mixing(self, rank: int, ticket: Ticket, op: Mix) -> None:
        self._posted[self._rounds[rank]][rank] = op.vector
        if op.last:
            self._last[rank] = op.vector
            self._clock.after(0.0, lambda: self._finish(rank, ticket, op.vector))
        else:
            self._mixing[rank] = ticket
        # random neighbours that are in later rounds may wait for a last vector, too
        self._mix(None if op.graph == "complete" or op.last else op.group(rank, self._present.order))

    def enter_ring(self, rank: int, giver: int, vector: Tensor) -> None:
        """Put a newcomer into its giver's round; for neighbours in earlier rounds, it posts its weights there, too."""
        if giver not in self._rounds:
            return
        self._rounds[rank] = self._rounds[giver]
        for number, posted in self._posted.items():
            if number < self._rounds[rank]:
                posted[rank] = vector.clone()
        self._mix()

    def _mix(self, ranks: list[int] | None = None) -> None:
        """Finish the rounds of all waiting learners that can, or of the given ones only."""
        for rank in sorted(self._mixing) if ranks is None else ranks:
            if rank in self._mixing:
                self._try(rank)

    def _try(self, rank: int) -> None:
        ticket, number = self._mixing[rank], self._rounds[rank]
        op = ticket.op
        assert isinstance(op, Mix)
        around = op.group(rank, self._present.order)
        posted = self._posted[number]
        if any(other not in posted and other not in self._last for other in around):
            return
        del self._mixing[rank]
        self._rounds[rank] = number + 1
        mixed = torch.zeros_like(op.vector)
        for other in around:
            mixed.add_(posted[other] if other in posted else self._last[other], alpha=1.0 / len(around))
        self._clock.at(self._mixed_at(rank, around, op), lambda: self._finish(rank, ticket, mixed))
        self._forget()

    def _mixed_at(self, rank: int, around: list[int], op: Mix) -> float:
        """Time when the last neighbour's weights arrive: each learner sends its own to each neighbour."""
        if op.graph == "complete":
            seconds = self._links.all_reduce(around, op.num_bytes / len(around)) if len(around) > 1 else 0.0
            return self._clock.now + seconds * len(around)
        others = [other for other in around if other != rank]
        return max((self._links.send(other, rank, op.num_bytes) for other in others), default=self._clock.now)

    def _forget(self) -> None:
        """Drop rounds that all learners have completed; only now and then, since it visits all learners."""
        self._mixed += 1
        if self._mixed % max(1, len(self._present.everybody)):
            return
        oldest = min((self._rounds[rank] for rank in self._present.everybody if rank not in self._last), default=0)
        for number in [number for number in self._posted if number < oldest]:
            del self._posted[number]
