"""A pipeline's step: batches that count once, and gradients or losses that are not finite."""

import math
from types import SimpleNamespace

import pytest

from training.learner.compute import Losses
from training.node.pipeline import PipelineStepper


def stage(rank, norm=2.0):
    """A stepper of one stage of two, and the updates that it makes."""
    made = []
    group = SimpleNamespace(rank=rank, gather_numbers=lambda values: [values, values])
    learner = SimpleNamespace(group=group, scale_gradient=lambda tokens: norm, update=made.append)
    return PipelineStepper(learner), made


@pytest.mark.parametrize(
    ("loss", "norm", "good"), [(3.0, 2.0, True), (math.inf, 2.0, False), (3.0, math.nan, False), (math.nan, 1.0, False)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_only_finite_losses_with_finite_gradients_change_the_weights(rank, loss, norm, good):
    stepper, made = stage(rank, norm)
    stepper.step(Losses(loss, 4, 9), False, 0.5)
    (result,) = stepper.results()
    assert (made, result.good) == (good * [0.5], good)
    assert not stepper.results()


def test_batch_without_utterances_changes_nothing_and_is_no_error():
    stepper, made = stage(0)
    stepper.step(Losses(), True, 0.5)
    (result,) = stepper.results()
    assert (made, result.good, result.parts[0].lost) == ([], True, True)


def test_the_first_stage_reads_the_batch_and_counts_it():
    for rank, rows, utterances in ((0, [1, 2], 9), (1, [], 0)):
        stepper, _ = stage(rank)
        assert stepper.share([1, 2]) == rows
        stepper.step(Losses(3.0, 4, 9), False, 0.5)
        assert stepper.results()[0].parts[0].losses.utterances == utterances
