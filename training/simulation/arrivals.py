"""How newcomers get into a simulated training that runs: whose weights they take, and when."""

from typing import TYPE_CHECKING, Any

from training.simulation.exchange import VirtualExchange
from training.simulation.seating import Learner
from training.strategies.registry import Joins
from training.strategies.requests import Wait

if TYPE_CHECKING:
    from training.simulation.world import Simulation


class Arrivals:
    """Newcomers of a simulation. They take over what the nearest learner has; `Method.joins` says at which moment.

    A newcomer of h-adpsgd brings its whole node with it.

    Args:
        world: Where they come to.
    """

    def __init__(self, world: "Simulation") -> None:
        self._world = world
        self._here: list[list[Learner]] = []

    def come(self, rank: int) -> None:
        """A learner, and its node with it, asks for the weights; they travel."""
        world = self._world
        newcomers = [one for one in world.learners if one.node == world.learners[rank].node and one.state == "away"]
        giver = self._giver(rank)
        if not newcomers or giver is None or world.pool.over:
            return
        first, size = newcomers[0].rank, giver.replica.num_bytes
        arrival = world.network.send(giver.rank, first, size)
        for other in newcomers[1:]:
            arrival = max(arrival, world.network.send(first, other.rank, size))
        world.clock.at(arrival, lambda: self._arrive(newcomers))

    def _arrive(self, newcomers: list[Learner]) -> None:
        self._here.append(newcomers)
        self.admit("at once")
        self.admit("during a gradient")

    def _giver(self, rank: int) -> Learner | None:
        there = [one for one in self._world.learners if one.state not in ("dead", "away", "ended")]
        return min(there, key=lambda one: (abs(one.rank - rank), one.rank), default=None)

    def admit(self, moment: Joins) -> None:
        """It is this moment: let those in who wait for it."""
        if not self._here or self._world.method.joins != moment:
            return
        here, self._here = self._here, []
        for newcomers in here:
            giver = self._giver(newcomers[0].rank)
            if giver is None or self._world.pool.over:
                continue
            if moment == "during a gradient" and giver.state != "computing":
                self._here.append(newcomers)  # its round's mean is not there yet
                continue
            for one in newcomers:
                self._equip(one, giver)
            self._world.enter(newcomers, giver)

    def _equip(self, learner: Learner, giver: Learner) -> None:
        """Weights, optimizer (by option where there is one) and what the method keeps, as the giver has them now."""
        world = self._world
        if getattr(world.config, "newcomer", "weights+optimizer") == "weights":
            learner.replica.weights.copy_(giver.replica.weights)
        elif not world.method.traits.shared:
            learner.replica.copy_from(giver.replica)
        if not world.method.free:
            _settle(giver)
            learner.seat.state = {name: tensor.clone() for name, tensor in giver.seat.state.items()}
        learner.asked = giver.asked - 1
        if world.method.traits.exchange and learner.rank == world.ether.ranks[learner.node]:
            learner.seat.exchange = VirtualExchange(world.ether, learner.node, learner.replica.weights.numel())


def _settle(giver: Learner) -> None:
    """Have a learner put what is under way into its state; at this moment it has arrived."""
    settling = giver.seat.settle()
    outcome: Any = None
    while True:
        try:
            request = settling.send(outcome)
        except StopIteration:
            return
        assert isinstance(request, Wait)
        assert request.ticket.done
        outcome = request.ticket.outcome
