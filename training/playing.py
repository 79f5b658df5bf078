"""Runs the program of a strategy (`training.strategies`) for real: the same that the simulator runs on a virtual clock.

The worker computes gradients; between two of them the program goes on until it wants the next one. Whatever it asks of
others is done by torch.distributed within the node, or by the parameter server.
"""

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from training.accounts import Part
from training.checkpoint import Kept, cpu_weights
from training.collectives import Collectives
from training.compute import Learner, Losses
from training.group import NodeGroup
from training.job import TrainJob
from training.optim import drop_momentum
from training.parameter_server.client import ServerClient
from training.shared_weights import SharedWeights
from training.stepping import Stepped, Stepper, Weights, keep
from training.strategies.base import (
    AllReduce,
    Compute,
    Elastic,
    Op,
    Program,
    Pull,
    Pulled,
    Push,
    Pushed,
    Request,
    Seat,
    Start,
    Ticket,
    Wait,
    Work,
)
from training.strategies.registry import find_method

MAX_TURNS = 16
"""Batches that learners train on without hearing from the store at most."""


class PlayedReplica:
    """A learner's weights and optimizer, as a program sees them.

    Args:
        learner: Model and optimizer.
        shared: Memory that the weights are in, for hogwild.
    """

    def __init__(self, learner: Learner, shared: SharedWeights | None = None) -> None:
        self.learner, self.shared = learner, shared
        self.num_bytes = 4.0 * learner.flat.weights.numel()
        self.lr = self.norm = 0.0
        self._updates = 0

    @property
    def weights(self) -> Tensor:
        """See `Replica`."""
        return self.learner.flat.weights

    @property
    def grads(self) -> Tensor:
        """See `Replica`."""
        return self.learner.flat.grads

    @property
    def updates(self) -> int:
        """See `Replica`."""
        return self.shared.updates() if self.shared else self._updates

    def clip(self) -> bool:
        """Clip the gradients; whether they are finite."""
        self.norm = self.learner.scale_gradient(1.0)
        return math.isfinite(self.norm)

    def update(self) -> None:
        """See `Replica`; a gradient that is not finite changes nothing."""
        if self.clip():
            self.learner.update(self.lr)
            self._updates += 1
            if self.shared:
                self.shared.count()

    def drop_momentum(self) -> None:
        """See `Replica`."""
        drop_momentum(self.learner.optimizer)


class PlayedStepper(Stepper):
    """A strategy's program at one rank; see `Stepper`.

    Args:
        job: What to train.
        node: Number of the node.
        learner: Model and optimizer.
        group: The node's ranks.
        server: The parameter server, where the strategy has one.
        shared: Memory for the weights, for hogwild.
        epoch_steps: Steps of a learner in an epoch.
    """

    measured = ("staleness",)

    def __init__(
        self,
        job: TrainJob,
        node: int,
        learner: Learner,
        group: NodeGroup,
        server: ServerClient | None = None,
        shared: SharedWeights | None = None,
        epoch_steps: float = 0.0,
    ) -> None:
        super().__init__(learner, group)
        cfg = job.train
        self.method = find_method(cfg.strategy)
        self.constants = getattr(cfg, cfg.strategy, None) or self.method.config()
        self.turns = min(MAX_TURNS, getattr(self.constants, "tau", 1)) if group.size > 1 else 1
        self.server, self.shared = server, shared
        self.replica = PlayedReplica(learner, shared)
        rank = node * group.size + group.rank
        self.seat = Seat(self.replica, rank, cfg.learners, epoch_steps=epoch_steps, stale=self._stale)
        self._collectives = Collectives(group)
        self._program: Program | None = None
        self._versions: list[int] = []
        self._server_state: Weights = {}
        self._staleness = 0.0
        self._rows: list[list[float]] = []

    def _stale(self, steps: float) -> None:
        self._staleness = steps

    # --- beginning

    @override
    def begin(self, session: str) -> None:
        flat, self.seat.joined = self.learner.flat, False
        if self.server:
            center = self._server_state.pop("center", flat.weights.cpu())
            self.server.init(session, center, self._server_state)
            self._server_state = {}
        if self.shared:
            flat.move(self.shared.enter(session, flat.weights))

    @override
    def start(self, step: int) -> None:
        self._program = self.method.program(self.seat, self.constants)
        self._go_on(None)

    @override
    def fetch(self) -> bool:
        if self.server:
            self.learner.flat.load(self._pull())
        elif self.shared:
            self.learner.flat.move(self.shared.enter("", self.replica.weights))
        else:
            return False
        self.seat.state.clear()
        self.seat.joined = True
        return bool(torch.isfinite(self.replica.weights).all())

    @override
    def forget(self) -> None:
        self.seat.state.clear()
        if self.shared:  # what is written next must not reach those who train already
            self.learner.flat.move(self.replica.weights.clone())

    # --- training

    @override
    def step(self, losses: Losses, lost: bool, lr: float) -> None:
        self.replica.lr, good = lr, math.isfinite(losses.loss)
        with torch.no_grad():
            if not good:
                self.replica.grads.fill_(math.nan)  # so that whoever gets a part of it leaves it out, too
            elif losses.tokens:
                self.replica.grads.div_(losses.tokens)
        if self._program is None:  # all was done, and then a node's loss has made new work
            self.start(0)
        self._go_on(Work(losses.tokens))
        good = good and math.isfinite(self.replica.norm)
        part = Part(losses, False, staleness=self._staleness, lost=lost)
        self._rows.append([*part.to_list(), self.replica.norm, float(good)])

    @override
    def results(self) -> list[Stepped]:
        width, mine = len(self._rows[0]), [value for row in self._rows for value in row]
        self._rows = []
        everybody = self.group.gather_numbers(mine)
        results = []
        for start in range(0, len(mine), width):
            rows = [values[start : start + width] for values in everybody]
            parts = [Part.from_list(row[:-2]) for row in rows]
            results.append(Stepped(parts, rows[0][-2], all(row[-1] for row in rows)))
        return results

    @override
    def conclude(self) -> None:
        while self._program is not None:
            self._go_on(None)

    def _go_on(self, value: Work | None) -> None:
        assert self._program is not None
        if not self._play(self._program, value):
            self._program = None

    def _play(self, program: Program, value: Work | None) -> bool:
        """Let a program go on until it wants a gradient; whether it does, and has not ended."""
        answer: Any = value
        while True:
            try:
                request: Request = program.send(answer)
            except StopIteration:
                return False
            if isinstance(request, Compute):
                return True
            if isinstance(request, Start):
                answer = self._start(request.op)
            else:
                assert isinstance(request, Wait), "programs that idle average through an exchange"
                answer = self._collectives.finish(request.ticket)

    def _start(self, op: Op) -> Ticket:
        if isinstance(op, Push):
            return Ticket(op, done=True, outcome=self._push(op))
        if isinstance(op, Pull):
            return Ticket(op, done=True, outcome=Pulled(self._pull(), sum(self._versions)))
        if isinstance(op, Elastic):
            assert self.server is not None
            return Ticket(op, done=True, outcome=self.server.elastic(op.vector, op.alpha))
        return self._collectives.begin(op)

    def _pull(self) -> Tensor:
        assert self.server is not None
        weights, self._versions = self.server.pull()
        return weights

    def _push(self, op: Push) -> Pushed:
        """Send a clipped gradient; one that is not finite stays here."""
        assert self.server is not None
        if not self.replica.clip():
            return Pushed(op.version, 0)
        versions, staleness = self.server.push(op.grads, self._versions, self.replica.lr)
        return Pushed(sum(versions), staleness)

    # --- what is left behind

    @override
    def model(self) -> Weights | None:
        if self.shared:
            return cpu_weights(self.learner.model)
        if self.server:
            return self._named(self._pull())
        op = AllReduce(self.replica.weights)
        mean: Tensor = self._collectives.finish(self._collectives.begin(op)).vector
        return self._named(self.seat.finish(mean)) if self.group.rank == 0 else None

    @torch.no_grad()
    def _named(self, vector: Tensor) -> Weights:
        """Flat weights by name."""
        weights = self.replica.weights
        mine = weights.clone()
        weights.copy_(vector)
        named = cpu_weights(self.learner.model)
        weights.copy_(mine)
        return named

    @override
    def keep(self) -> Kept:
        self._play(self.seat.settle(), None)
        kept = keep(self.learner, self.seat.state)
        if self.server:
            served = {f"server.{name}": tensor for name, tensor in self.server.state().items()}
            return Kept(kept.weights, kept.optimizer, {**kept.state, **served, "server.center": self._pull()})
        return kept

    @override
    def restore(self, kept: Kept) -> None:
        super().restore(kept)
        for name, tensor in kept.state.items():
            if name.startswith("server."):
                self._server_state[name.removeprefix("server.")] = tensor
            else:
                self.seat.state[name] = tensor
