"""Timing of a batch in a pipeline: the order of each stage's passes, and the messages between stages."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from training.simulation.clock import Clock
from training.simulation.network import LinkModel

FORWARD = 1 / 3
"""Share of the forward pass in a step: for each matrix product of the forward pass, the backward pass computes two, for
the inputs and for the weights."""

Kind = Literal["gpipe", "1f1b"]


class Pass(NamedTuple):
    """The forward or backward pass of a micro-batch through a stage."""

    forward: bool
    number: int


def schedule(kind: Kind, stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """The passes of a stage in order, as in torch.distributed.pipelining's ScheduleGPipe and Schedule1F1B.

    GPipe (arXiv:1811.06965) runs all micro-batches forward, then all backward. 1F1B (arXiv:2006.09503) starts with one
    forward pass for every stage from this one on, then alternates backward and forward passes.

    Args:
        kind: The schedule.
        stage: Number of the stage, from 0.
        stages: Number of stages.
        micro_batches: Number of micro-batches; for 1F1B, at least the number of stages.
    """
    forward = [Pass(True, number) for number in range(micro_batches)]
    backward = [Pass(False, number) for number in range(micro_batches)]
    if kind == "gpipe":
        return forward + backward
    first = stages - stage - 1
    turns = [one for pair in zip(forward[first:], backward, strict=False) for one in pair]
    return forward[:first] + turns + backward[micro_batches - first :]


class Stages:
    """Times the batches of a pipeline; learner r has stage r.

    A pass starts when the stage has finished its previous one and the input has arrived: hidden frames from the stage
    before, or their gradients from the stage after. Messages overlap with computation, except in 1F1B's alternating
    phase: there a stage waits for its own message, since torch.distributed.pipelining fuses its send with a receive.

    Args:
        clock: Virtual time.
        links: Model of the messages' cost.
        stages: Number of stages.
    """

    def __init__(self, clock: Clock, links: LinkModel, stages: int) -> None:
        self._clock, self._links, self._stages = clock, links, stages
        self._busy = [False] * stages

    def run(self, kind: Kind, micro_batches: int, seconds: Sequence[float], num_bytes: float) -> None:
        """Run one batch, and advance the clock to the end of the last pass.

        Args:
            kind: Schedule.
            micro_batches: Number of equal parts of the batch.
            seconds: Computation time of each stage for the whole batch, forward and backward.
            num_bytes: Size of the batch's hidden frames between two stages; their gradients have the same size.
        """
        self._orders = [schedule(kind, stage, self._stages, micro_batches) for stage in range(self._stages)]
        self._seconds = [one / micro_batches for one in seconds]
        self._message = num_bytes / micro_batches
        self._place = [0] * self._stages
        self._here: set[tuple[int, Pass]] = set()
        self._held = [self._clock.now] * self._stages
        # 1F1B fuses sends and receives from the last pass of its warm-up phase to its last forward pass
        turns = [range(self._stages - stage - 1, 2 * micro_batches - self._stages + stage) for stage in self._all]
        self._waits = turns if kind == "1f1b" else [range(0)] * self._stages
        for stage in self._all:
            self._go_on(stage)
        while self._clock.step():
            pass
        assert self._place == [2 * micro_batches] * self._stages

    @property
    def _all(self) -> range:
        return range(self._stages)

    def _go_on(self, stage: int) -> None:
        """Start the next pass of a stage if its input is there."""
        place, order = self._place[stage], self._orders[stage]
        if self._busy[stage] or place == len(order):
            return
        one = order[place]
        last = stage == self._stages - 1
        # forward passes of the first stage and backward passes of the last one need no message
        if (stage, one) in self._here or (stage == 0 and one.forward) or (last and not one.forward):
            self._busy[stage] = True
            seconds = self._seconds[stage] * (FORWARD if one.forward else 1 - FORWARD)
            self._clock.at(max(self._clock.now, self._held[stage]) + seconds, _later(self._done, stage, one))

    def _done(self, stage: int, one: Pass) -> None:
        self._busy[stage] = False
        target = stage + 1 if one.forward else stage - 1
        if 0 <= target < self._stages:
            arrival = self._links.send(stage, target, self._message)
            self._clock.at(arrival, _later(self._arrive, target, one))
            if self._place[stage] in self._waits[stage]:
                self._held[stage] = arrival
        self._place[stage] += 1
        self._go_on(stage)

    def _arrive(self, stage: int, one: Pass) -> None:
        self._here.add((stage, one))
        self._go_on(stage)


def _later(function: Callable[[int, Pass], None], stage: int, one: Pass) -> Callable[[], None]:
    return lambda: function(stage, one)
