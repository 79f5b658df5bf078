"""The stepper of strategy `pipeline`: every rank has a stage of the model, and all work on the same batch."""

import math

from typing_extensions import override

from training.learner.compute import Losses
from training.node.pipeline_learner import PipelineLearner
from training.node.step_counters import StepReport
from training.node.stepper import Rows, Stepped, Stepper, Weights


class PipelineStepper(Stepper):
    """Stepper of strategy `pipeline`.

    Args:
        learner: This rank's stage.
    """

    def __init__(self, learner: PipelineLearner) -> None:
        super().__init__(learner, learner.group)
        self.learner: PipelineLearner = learner
        self._results: list[Stepped] = []

    @override
    def share(self, rows: Rows) -> Rows:
        # the first stage reads the whole batch
        return rows if self.group.rank == 0 else rows[:0]

    @override
    def step(self, losses: Losses, lost: bool, lr: float) -> None:
        # all ranks have the whole batch's losses: count them once
        part = StepReport(losses if self.group.rank == 0 else Losses(), False, lost=lost)
        parts = [StepReport.from_list(values) for values in self.group.gather_numbers(part.to_list())]
        norm = self.learner.scale_gradient(losses.tokens)
        good = math.isfinite(norm) and math.isfinite(losses.loss)
        if good and losses.utterances:
            self.learner.update(lr)
        self._results.append(Stepped(parts, norm, good))

    @override
    def results(self) -> list[Stepped]:
        results, self._results = self._results, []
        return results

    @override
    def model(self) -> Weights | None:
        return self.learner.gather_state()

    @override
    def merge(self, replicas: list[Weights]) -> None:
        # stages are parts of one model: nothing is averaged
        self.learner.load_state({name: tensor for part in replicas for name, tensor in part.items()})
