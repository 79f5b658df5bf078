"""Newcomers in a running simulation: whose weights they take, and when."""

from typing import TYPE_CHECKING, Any

from training.simulation.exchange import VirtualExchange
from training.simulation.learners import SimulatedLearner
from training.strategies.requests import Wait
from training.strategies.strategy import JoinPoint

if TYPE_CHECKING:
    from training.simulation.simulator import Simulation


class Arrivals:
    """Newcomers of a simulation. They copy the nearest learner's state at the moment that `Method.join_point` defines.

    With h-adpsgd, a newcomer brings its whole node.

    Args:
        simulation: The simulation that they join.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._here: list[list[SimulatedLearner]] = []

    def come(self, rank: int) -> None:
        """Let a learner, and with it its node, request the weights, which then travel to it."""
        simulation = self._simulation
        newcomers = [
            one for one in simulation.learners if one.node == simulation.learners[rank].node and one.state == "away"
        ]
        giver = self._giver(rank)
        if not newcomers or giver is None or simulation.pool.over:
            return
        first, size = newcomers[0].rank, giver.replica.num_bytes
        arrival = simulation.links.send(giver.rank, first, size)
        for other in newcomers[1:]:
            arrival = max(arrival, simulation.links.send(first, other.rank, size))
        simulation.clock.at(arrival, lambda: self._arrive(newcomers))

    def _arrive(self, newcomers: list[SimulatedLearner]) -> None:
        self._here.append(newcomers)
        self.admit("immediately")
        self.admit("during compute")

    def _giver(self, rank: int) -> SimulatedLearner | None:
        there = [one for one in self._simulation.learners if one.state not in ("dead", "away", "ended")]
        return min(there, key=lambda one: (abs(one.rank - rank), one.rank), default=None)

    def admit(self, moment: JoinPoint) -> None:
        """Admit the newcomers that wait for this moment."""
        if not self._here or self._simulation.method.join_point != moment:
            return
        here, self._here = self._here, []
        for newcomers in here:
            giver = self._giver(newcomers[0].rank)
            if giver is None or self._simulation.pool.over:
                continue
            if moment == "during compute" and giver.state != "computing":
                self._here.append(newcomers)  # the giver still waits for its round's mean
                continue
            for one in newcomers:
                self._equip(one, giver)
            self._simulation.enter(newcomers, giver)

    def _equip(self, learner: SimulatedLearner, giver: SimulatedLearner) -> None:
        """Copy the giver's weights, its optimizer's state (unless configured otherwise) and its program's state."""
        simulation = self._simulation
        if getattr(simulation.config, "newcomer", "weights+optimizer") == "weights":
            learner.replica.weights.copy_(giver.replica.weights)
        elif not simulation.method.traits.shared:
            learner.replica.copy_from(giver.replica)
        if not simulation.method.free:
            _settle(giver)
            learner.context.state = {name: tensor.clone() for name, tensor in giver.context.state.items()}
        learner.asked = giver.asked - 1
        if simulation.method.traits.exchange and learner.rank == simulation.network.ranks[learner.node]:
            learner.context.exchange = VirtualExchange(
                simulation.network, learner.node, learner.replica.weights.numel()
            )


def _settle(giver: SimulatedLearner) -> None:
    """Let a learner store its pending communication in its state; the outcome has already arrived."""
    settling = giver.context.settle()
    outcome: Any = None
    while True:
        try:
            request = settling.send(outcome)
        except StopIteration:
            return
        assert isinstance(request, Wait)
        assert request.ticket.done
        outcome = request.ticket.outcome
