"""Runs the collectives of a strategy's program between the learners of a node, with torch.distributed."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.node.process_group import NodeGroup
from training.strategies.base import StrategyError
from training.strategies.requests import AllReduce, Mix, Op, Reduced, Ticket


@dataclass
class Underway(Ticket):
    """A collective in progress.

    Attributes:
        works: Handles of torch.distributed's operations.
        buffer: Receives the sum.
        received: Receive the neighbours' vectors.
    """

    works: list[dist.Work] = field(default_factory=list)
    buffer: Tensor | None = None
    received: list[Tensor] = field(default_factory=list)


class NodeCollectives:
    """Starts and finishes collectives; all ranks must start the same ones in the same order.

    Args:
        group: The node's ranks.
    """

    def __init__(self, group: NodeGroup) -> None:
        self.group = group

    def begin(self, op: Op) -> Ticket:
        """Start a collective without waiting for it.

        Raises:
            StrategyError: If the learners of a node do not support the operation.
        """
        if isinstance(op, AllReduce):
            return self._all_reduce(op)
        if isinstance(op, Mix):
            return self._mix(op)
        raise StrategyError(f"the learners of a node have no {type(op).__name__} between them")

    def finish(self, ticket: Ticket) -> Any:
        """Wait for a collective.

        Returns:
            Its outcome, as defined in `training.strategies.requests`.
        """
        if ticket.done:
            return ticket.outcome
        assert isinstance(ticket, Underway)
        for work in ticket.works:
            work.wait()
        op = ticket.op
        if isinstance(op, AllReduce):
            assert ticket.buffer is not None
            total = float(ticket.buffer[-1])
            mean = ticket.buffer[:-1] if total == 0 else ticket.buffer[:-1].div_(total)
            ticket.outcome = Reduced(mean, total)
        else:
            assert isinstance(op, Mix)
            ticket.outcome = self._mixed(op, ticket)
        ticket.done, ticket.works, ticket.buffer, ticket.received = True, [], None, []
        return ticket.outcome

    def _all_reduce(self, op: AllReduce) -> Underway:
        """All-reduce the weighted vector, with its weight appended."""
        buffer = op.vector.new_empty(op.vector.numel() + 1)
        buffer[-1] = op.weight
        if op.weight:
            torch.mul(op.vector, op.weight, out=buffer[:-1])
        else:
            buffer[:-1].zero_()  # 0 * NaN would be NaN
        return Underway(op, works=self._sum(buffer), buffer=buffer)

    def _sum(self, buffer: Tensor) -> list[dist.Work]:
        if self.group.size == 1:
            return []
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        return [work]

    def _mix(self, op: Mix) -> Ticket:
        rank, size = self.group.rank, self.group.size
        if op.last or size == 1:  # all ranks take their last step together, so no neighbour needs this vector
            return Ticket(op, done=True, outcome=op.vector)
        if op.graph == "complete":
            buffer = op.vector.clone()
            return Underway(op, works=self._sum(buffer), buffer=buffer)
        neighbours = [peer for peer in op.group(rank, range(size)) if peer != rank]
        mine = op.vector.cpu() if self.group.shares_gpu else op.vector
        received = [torch.empty_like(mine) for _ in neighbours]
        wishes = [dist.P2POp(dist.isend, mine, peer) for peer in neighbours]
        wishes += [dist.P2POp(dist.irecv, box, peer) for box, peer in zip(received, neighbours, strict=True)]
        return Underway(op, works=dist.batch_isend_irecv(wishes) if wishes else [], received=received)

    def _mixed(self, op: Mix, ticket: Underway) -> Tensor:
        if op.graph == "complete":
            assert ticket.buffer is not None
            return ticket.buffer.div_(self.group.size)
        mixed = op.vector.clone()
        for vector in ticket.received:
            mixed.add_(vector.to(mixed.device))
        return mixed.div_(1 + len(ticket.received))
