"""The simulator against published tables; the calibration uses other rows than those that are predicted."""

import functools

import pytest

from training.simulation.calibrate import SLOW_DOWNS, STRAGGLERS, calibrate, straggler_hours
from training.simulation.planner import PlanRequest, predict
from training.strategies.gossip import HierarchicalGossipConfig

hours = functools.cache(functools.partial(straggler_hours, steps=40))


@pytest.mark.parametrize("row", [1, 2, 3], ids=["2x", "10x", "100x"])
@pytest.mark.parametrize("strategy", sorted(STRAGGLERS))
def test_one_slow_learner_of_sixteen(strategy, row):
    """Published: arXiv:1904.04956. Every ratio to the undisturbed epoch is met within 10 %."""
    published = STRAGGLERS[strategy][row] / STRAGGLERS[strategy][0]
    assert hours(strategy, SLOW_DOWNS[row]) / hours(strategy, 1.0) == pytest.approx(published, rel=0.10)


@pytest.mark.parametrize("strategy", sorted(STRAGGLERS))
def test_the_undisturbed_epoch_is_met(strategy):
    assert hours(strategy, 1.0) == pytest.approx(STRAGGLERS[strategy][0], rel=0.02)


def test_the_calibrations_agree_on_the_computation():
    """The tables of three methods imply the same hours of computation: the cost model is consistent."""
    computes = [calibrate(strategy).compute for strategy in STRAGGLERS]
    assert max(computes) / min(computes) < 1.04


@pytest.mark.parametrize(("gpus", "published"), [(16, 20.0), (32, 9.9), (64, 5.2)])
def test_h_adpsgd_scales_as_published(gpus, published):
    """arXiv:2002.10502, table III, 8 V100 a node. Calibrated with the rows of 1 and 16 GPUs (195 h, 20.0 h)."""
    hours_alone, steps = 195.0, 1000
    step_s = hours_alone / steps
    exposed_s = 16 * 20.0 / steps - step_s
    request = PlanRequest(
        parameters=43_000_000,
        step_s=step_s,
        overhead_s=exposed_s,
        data_hours=steps / 3600,
        batch_seconds=1,
        nodes=gpus // 8,
        gpus_per_node=8,
        link_gbit=1e6,  # what is exposed is in the calibration; one virtual second is an hour of theirs
        local_gbit=1e6,
        link_ms=0,
    )
    predicted = predict(request, "h-adpsgd", "h-adpsgd", HierarchicalGossipConfig()).epoch_s
    assert predicted == pytest.approx(published, rel=0.15)
