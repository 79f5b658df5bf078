"""A batch on its way through the stages of a pipeline: what each does when, and what travels between them."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from training.simulation.clock import Clock
from training.simulation.network import LinkModel

FORWARD = 1 / 3
"""Share of a step that the forward pass takes: the backward pass computes two products where the forward one has one,
for the inputs and for the weights."""

Kind = Literal["gpipe", "1f1b"]


class Pass(NamedTuple):
    """A micro-batch forward or backward through a stage."""

    forward: bool
    number: int


def schedule(kind: Kind, stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """What a stage does, in this order: that of torch.distributed.pipelining's ScheduleGPipe and Schedule1F1B.

    GPipe (arXiv:1811.06965) sends all micro-batches forward, then all backward. 1F1B (arXiv:2006.09503) begins with one
    forward pass for every stage from this one on, and takes turns from there.

    Args:
        kind: Which of the two.
        stage: From 0.
        stages: How many there are.
        micro_batches: For 1F1B, as many as stages at least.
    """
    forward = [Pass(True, number) for number in range(micro_batches)]
    backward = [Pass(False, number) for number in range(micro_batches)]
    if kind == "gpipe":
        return forward + backward
    first = stages - stage - 1
    turns = [one for pair in zip(forward[first:], backward, strict=False) for one in pair]
    return forward[:first] + turns + backward[micro_batches - first :]


class Stages:
    """Takes batches through a pipeline; learner r has stage r.

    A pass begins when the stage has done the one before, and what it needs has come: hidden frames from the stage
    before, or their gradients from the stage behind. Messages travel while stages compute. 1F1B's turns alone wait
    for their own, as the schedule of torch.distributed.pipelining sends and receives in one.

    Args:
        clock: Virtual time.
        links: Carries what travels.
        stages: How many.
    """

    def __init__(self, clock: Clock, links: LinkModel, stages: int) -> None:
        self._clock, self._links, self._stages = clock, links, stages
        self._orders: list[list[Pass]] = []
        self._seconds: Sequence[float] = ()
        self._message = 0.0
        self._place = [0] * stages
        self._busy = [False] * stages
        self._held = [0.0] * stages
        self._here: set[tuple[int, Pass]] = set()

    def run(self, kind: Kind, micro_batches: int, seconds: Sequence[float], num_bytes: float) -> None:
        """One batch, until the last stage has done its last pass; the clock says when that is.

        Args:
            kind: Schedule.
            micro_batches: Equal parts of the batch.
            seconds: What each stage computes for all of it, forward and backward.
            num_bytes: Of the hidden frames of all of it, and of their gradients, between two stages.
        """
        self._orders = [schedule(kind, stage, self._stages, micro_batches) for stage in range(self._stages)]
        self._seconds = [one / micro_batches for one in seconds]
        self._message = num_bytes / micro_batches
        self._place, self._here = [0] * self._stages, set()
        self._held = [self._clock.now] * self._stages
        # 1F1B sends and receives in one from its last forward pass ahead to its last forward pass of all
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
        """Begin the next pass of a stage, if it can."""
        place, order = self._place[stage], self._orders[stage]
        if self._busy[stage] or place == len(order):
            return
        one = order[place]
        last = stage == self._stages - 1
        # the first stage has the batch, the last one its loss
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
