"""The parameter server in virtual time: it processes a message at the time of its arrival."""

from collections.abc import Callable
from typing import Any

import torch

from training.simulation.clock import Clock
from training.simulation.network import LinkModel
from training.simulation.problem import Trainable
from training.strategies.requests import Elastic, Pull, Pulled, Push, Pushed, Ticket

Finish = Callable[[int, Ticket, Any], None]


class VirtualParameterServer:
    """Weights with an optimizer, on several processes with a link each.

    Args:
        replica: The server's weights and optimizer.
        servers: Number of processes.
        clock: Virtual time.
        links: Model of the messages' cost.
        rate: Returns the current learning rate.
        finish: Called with each learner's outcome when it arrives.
    """

    def __init__(
        self,
        replica: Trainable,
        servers: int,
        clock: Clock,
        links: LinkModel,
        rate: Callable[[], float],
        finish: Finish,
    ) -> None:
        self.replica, self.version = replica, 0
        self._servers, self._clock, self._links = servers, clock, links
        self._rate, self._finish = rate, finish

    def ask(self, rank: int, ticket: Ticket) -> None:
        """Send a learner's request."""
        op = ticket.op
        size = 0.0 if isinstance(op, Pull) else getattr(op, "num_bytes", 0.0)
        arrival = self._links.to_server(rank, self._servers, size)
        self._clock.at(arrival, lambda: self._serve(rank, ticket))

    def _serve(self, rank: int, ticket: Ticket) -> None:
        op, size = ticket.op, 0.0
        outcome: Any
        if isinstance(op, Push):
            outcome = self._push(op)
        elif isinstance(op, Pull):
            outcome, size = Pulled(self.replica.weights.clone(), self.version), op.num_bytes
        else:
            assert isinstance(op, Elastic)
            outcome, size = op.alpha * (op.vector - self.replica.weights), op.num_bytes
            self.replica.weights.add_(outcome)
        answer = outcome
        self._clock.at(self._links.from_server(rank, self._servers, size), lambda: self._finish(rank, ticket, answer))

    @torch.no_grad()
    def _push(self, op: Push) -> Pushed:
        staleness = self.version - op.version
        self.replica.grads.copy_(op.grads)
        self.replica.set_rate(self._rate())
        self.replica.update()
        self.version += 1
        return Pushed(self.version, staleness)
