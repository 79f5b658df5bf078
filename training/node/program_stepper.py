"""Runs the program of a strategy (`training.strategies`) on a real learner; the simulator runs it on virtual ones.

The worker computes gradients; after each, the program runs until it requests the next one. Its operations are executed
by torch.distributed within the node, by the node's exchange, or by the parameter server.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from training.job import TrainJob
from training.learner.checkpoint import ReplicaState, cpu_weights
from training.learner.compute import Learner, Losses
from training.node.collectives import NodeCollectives
from training.node.comm_hooks import build_hook, codec_hook
from training.node.learner_replica import LearnerReplica, SharedWeights
from training.node.node_exchange import NodeExchange
from training.node.process_group import GradientReducer
from training.node.step_counters import StepReport, together
from training.node.stepper import Stepped, Stepper, Weights, keep
from training.parameter_server.client import ServerClient
from training.strategies.base import LearnerContext
from training.strategies.registry import method_of
from training.strategies.requests import (
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
    Start,
    Ticket,
    Wait,
    Work,
)

MAX_TURNS = 16
"""Maximum number of batches that a node's learners train on between two decisions of rank 0."""
_EXCHANGED = ("exchange_s", "staleness", "distance", "exchanges_per_step")


class ProgramStepper(Stepper):
    """Stepper of a strategy that is defined by a program.

    Args:
        job: What to train.
        learner: Model and optimizer.
        ring: The node's ranks, and the exchange with other nodes.
        server: The parameter server, if the strategy uses one.
        shared: Memory for the weights, for hogwild.
        epoch_steps: Steps of a learner in an epoch.
    """

    def __init__(
        self,
        job: TrainJob,
        learner: Learner,
        ring: NodeExchange,
        server: ServerClient | None = None,
        shared: SharedWeights | None = None,
        epoch_steps: float = 0.0,
    ) -> None:
        group, cfg = ring.group, job.train
        super().__init__(learner, group)
        self.ring, self.server, self.shared = ring, server, shared
        self.method = method_of(cfg.strategy.kind)
        self.constants = cfg.strategy if isinstance(cfg.strategy, self.method.config) else self.method.config()
        self.turns = min(MAX_TURNS, getattr(self.constants, "tau", 1)) if group.size > 1 else 1
        self._hook = build_hook(cfg, group.device) if group.size > 1 else None
        self._reducer: GradientReducer | None = None
        learner.alone = group.size == 1
        if self.method.equal:
            self._reducer = GradientReducer(group, learner.flat, hook=self._hook)
            learner.held = self._reducer.held
        self.state_per_rank = self.method.state_per_rank or (self._hook is not None and self._hook.state is not None)
        self.measured = _EXCHANGED if ring.exchange else () if self.method.equal else ("staleness",)
        self.replica = LearnerReplica(learner, shared)
        rank = ring.node * group.size + group.rank
        self.context = LearnerContext(self.replica, rank, cfg.learners, epoch_steps=epoch_steps, stale=self._stale)
        self._collectives = NodeCollectives(group)
        self._program: Program | None = None
        self._request = Compute()
        self._versions: list[int] = []
        self._server_state: Weights = {}
        self._staleness = 0.0
        self._rows: list[list[float]] = []
        self._results: list[Stepped] = []

    def _stale(self, steps: float) -> None:
        self._staleness = steps

    # --- beginning

    @override
    def begin(self, session: str) -> None:
        flat, self.context.joined = self.learner.flat, False
        if self.server:
            center = self._server_state.pop("center", flat.weights.cpu())
            self.server.init(session, center, self._server_state)
            self._server_state = {}
        if self.shared:
            flat.move(self.shared.enter(session, flat.weights))

    @override
    def start(self, step: int) -> None:
        if self._program is not None:
            self._settle()
        self.ring.start(step)
        self._start_program()

    def _start_program(self) -> None:
        self._program = self.method.program(self.context, self.constants)
        self._go_on(None)

    @override
    def fetch(self) -> bool:
        if self.ring.exchange:
            return self.ring.take_from_neighbour()
        if self.server:
            self.learner.flat.load(self._pull())
        elif self.shared:
            self.learner.flat.move(self.shared.enter("", self.replica.weights))
        else:
            return False
        self._drop_state()
        self.context.joined = True
        return bool(torch.isfinite(self.replica.weights).all())

    @override
    def forget(self) -> None:
        self._drop_state()
        if self._hook:
            self._hook.load_tensors({})
        if self.shared:  # new weights must not overwrite those that other learners train already
            self.learner.flat.move(self.replica.weights.clone())

    def _drop_state(self) -> None:
        self.context.state.clear()
        self._program = None

    # --- training

    @override
    def step(self, losses: Losses, lost: bool, lr: float) -> None:
        self.replica.lr = lr
        if self._program is None:  # all work was done, then a lost node's lease returned to the pool
            self._start_program()
        if self._request.reduce == "own":
            self._step_alone(losses, lost)
        else:
            self._step_together(losses, lost)

    def _step_alone(self, losses: Losses, lost: bool) -> None:
        """Pass this rank's own gradient to the program."""
        good, ready = math.isfinite(losses.loss), self._request.average and self.ring.ready()
        if self._request.average and self.group.any(ready):
            self.ring.average(ready)
        with torch.no_grad():
            if not good:
                self.replica.grads.fill_(math.nan)  # receivers of any part of it skip it, too
            elif losses.tokens:
                self.replica.grads.div_(losses.tokens)
        self._go_on(Work(losses.tokens))
        good = good and math.isfinite(self.replica.norm)
        part = StepReport.of(losses, ready, self.ring.stats(), self.ring.rate.per_step, lost)
        if self.ring.exchange is None:
            part.staleness = self._staleness
        self._rows.append([*part.to_list(), self.replica.norm, float(good)])

    def _step_together(self, losses: Losses, lost: bool) -> None:
        """Pass the mean gradient of the node to the program, and add the results of exchanges finished meanwhile."""
        assert self._reducer is not None
        self._reducer.finish()
        ring, request = self.ring, self._request
        part = StepReport.of(losses, request.average and ring.ready(), ring.stats(), ring.rate.per_step, lost)
        parts = [StepReport.from_list(values) for values in self.group.gather_numbers(part.to_list())]
        sums = together(parts)
        norm = self.learner.scale_gradient(sums.tokens, self.learner.norm)
        good = math.isfinite(norm) and math.isfinite(sums.loss)
        if any(each.ready for each in parts):
            ring.average(part.ready)
        self._results.append(Stepped(parts, norm, good))
        if not good:
            if self._hook:
                self._hook.forget()
            if request.codec:
                request.codec.forget()
        self.replica.scaled = True
        self._go_on(Work(max(1.0, sums.tokens) if good and sums.utterances else 0.0))
        self.replica.scaled = False

    @override
    def after(self, step: int) -> None:
        self.ring.after_step(step, self._averages)

    @override
    def idle(self, step: int) -> None:
        self.ring.idle(step, self._averages)

    @property
    def _averages(self) -> bool:
        """Whether weights are averaged until the next update; a program that has ended leaves no delta behind."""
        return self._program is None or self._request.average

    @override
    def results(self) -> list[Stepped]:
        results, self._results = self._results, []
        if not self._rows:
            return results
        width, mine = len(self._rows[0]), [value for row in self._rows for value in row]
        self._rows = []
        gathered = self.group.gather_numbers(mine)
        for start in range(0, len(mine), width):
            rows = [values[start : start + width] for values in gathered]
            parts = [StepReport.from_list(row[:-2]) for row in rows]
            results.append(Stepped(parts, rows[0][-2], all(row[-1] for row in rows)))
        return results

    @override
    def conclude(self) -> None:
        while self._program is not None:
            self._go_on(None)

    def _go_on(self, value: Work | None) -> None:
        assert self._program is not None
        request = self._play(self._program, value)
        if request is None:
            self._program = None
            return
        self._request = request
        if self._reducer:
            self._reducer.hook = partial(codec_hook, request.codec) if request.codec else self._hook

    def _play(self, program: Program, value: Work | None) -> Compute | None:
        """Run a program until it requests a gradient; None if it has ended."""
        answer: Any = value
        while True:
            try:
                request: Request = program.send(answer)
            except StopIteration:
                return None
            if isinstance(request, Compute):
                return request
            if isinstance(request, Start):
                answer = self._begin_op(request.op)
            else:
                assert isinstance(request, Wait)
                answer = self._collectives.finish(request.ticket)

    def _begin_op(self, op: Op) -> Ticket:
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
        """Send the clipped gradient; a non-finite one is not sent."""
        assert self.server is not None
        if not self.replica.clip():
            return Pushed(op.version, 0)
        versions, staleness = self.server.push(op.grads, self._versions, self.replica.lr)
        return Pushed(sum(versions), staleness)

    # --- what is left behind

    @override
    def model(self) -> Weights | None:
        ema = self.learner.ema
        if self.server:
            return self._named(self._pull()) | (ema.tensors() if ema else {})
        if self.shared or self.method.equal:
            return self.learner.state() if self.group.rank == 0 else None
        mean, averaged = self._mean(self.replica.weights), self._mean(ema.values) if ema else None
        if self.group.rank:
            return None
        return self._named(self.context.finish(mean)) | (ema.tensors(averaged) if ema else {})

    def _mean(self, vector: Tensor) -> Tensor:
        """The mean of a vector over the node's learners."""
        mean: Tensor = self._collectives.finish(self._collectives.begin(AllReduce(vector))).vector
        return mean

    @torch.no_grad()
    def _named(self, vector: Tensor) -> Weights:
        """Flat weights by name."""
        weights = self.replica.weights
        mine = weights.clone()
        weights.copy_(vector)
        named = cpu_weights(self.learner.model)
        weights.copy_(mine)
        return named

    def _settle(self) -> None:
        """Finish the program's pending operations, so that its state is complete."""
        self._play(self.context.settle(), None)

    @override
    def keep(self) -> ReplicaState:
        self._settle()
        kept = keep(self.learner, self._hook.state_tensors() if self._hook else self.context.state)
        if self.server:
            served = {f"server.{name}": tensor for name, tensor in self.server.state().items()}
            return ReplicaState(kept.weights, kept.optimizer, {**kept.state, **served, "server.center": self._pull()})
        return kept

    @override
    def restore(self, kept: ReplicaState) -> None:
        super().restore(kept)
        if self._hook:
            self._hook.load_tensors(kept.state)
            return
        for name, tensor in kept.state.items():
            if name.startswith("server."):
                self._server_state[name.removeprefix("server.")] = tensor
            else:
                self.context.state[name] = tensor
