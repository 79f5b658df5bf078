"""Learning rates against the published recipe (arXiv:1904.04956): 16 epochs, batch 256, rate 0.1."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.config import ScheduleConfig
from training.learner.schedule import learning_rate

SMALL = ScheduleConfig(kind="published", warmup_epochs=0, hold_epochs=10, reference_batch=256)
LARGE = ScheduleConfig(kind="published", warmup_epochs=10, hold_epochs=10, reference_batch=256)


@pytest.mark.parametrize("progress", [0.0, 0.5, 5.0, 9.999])
def test_the_first_ten_epochs_of_the_published_recipe_are_flat(progress):
    assert learning_rate(SMALL, 0.1, progress, 16, batch=256) == pytest.approx(0.1)


@pytest.mark.parametrize(("epoch", "power"), [(11, 1), (12, 2), (13, 3), (16, 6)])
@pytest.mark.parametrize("within", [0.0, 0.3, 0.999])
def test_each_later_epoch_is_annealed_by_one_over_root_two(epoch, power, within):
    rate = learning_rate(SMALL, 0.1, epoch - 1 + within, 16, batch=256)
    assert rate == pytest.approx(0.1 / math.sqrt(2) ** power)


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.0), (1.0, 0.1), (2.5, 0.25), (9.0, 0.9), (9.999, 0.9999)])
def test_a_large_batch_warms_up_linearly_over_ten_epochs(progress, share):
    peak = 0.1 * 8192 / 256
    assert learning_rate(LARGE, 0.1, progress, 16, batch=8192) == pytest.approx(peak * share)


def test_a_large_batch_is_annealed_from_the_eleventh_epoch():
    assert learning_rate(LARGE, 0.1, 10.0, 16, batch=8192) == pytest.approx(3.2 / math.sqrt(2))
    assert learning_rate(LARGE, 0.1, 15.5, 16, batch=8192) == pytest.approx(3.2 / math.sqrt(2) ** 6)


def test_rate_warms_up_linearly_to_a_plateau():
    cfg = ScheduleConfig(warmup_epochs=2, hold_epochs=5)
    rates = [learning_rate(cfg, 1.0, progress, 8) for progress in (1.0, 2.0, 3.5, 4.99, 5.0)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, math.sqrt(0.5)])


def test_batch_size_does_not_matter_without_a_reference():
    cfg = ScheduleConfig(warmup_epochs=0)
    assert learning_rate(cfg, 0.1, 1.0, 16, batch=4096) == 0.1


def test_cosine_ends_at_zero():
    cfg = ScheduleConfig(kind="cosine", warmup_epochs=2)
    rates = [learning_rate(cfg, 1.0, progress, 10) for progress in (1, 2, 6, 10, 11)]
    assert rates == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0], abs=1e-12)


def test_constant_schedule_keeps_the_rate():
    cfg = ScheduleConfig(kind="constant", warmup_epochs=1, hold_epochs=3)
    assert [learning_rate(cfg, 0.3, progress, 10) for progress in (0.5, 1, 9)] == pytest.approx([0.15, 0.3, 0.3])


@settings(max_examples=100)
@given(
    kind=st.sampled_from(["published", "cosine", "constant"]),
    warmup=st.floats(0, 10),
    hold=st.floats(0, 20),
    progress=st.floats(0, 30),
    epochs=st.integers(1, 30),
)
def test_rates_lie_between_zero_and_the_peak(kind, warmup, hold, progress, epochs):
    cfg = ScheduleConfig(kind=kind, warmup_epochs=warmup, hold_epochs=hold)
    assert 0.0 <= learning_rate(cfg, 0.1, progress, epochs) <= 0.1
