"""How much processor time exchanges beyond the first one of a step may take."""

from training.exchange.cpu_budget import CpuBudget


def test_a_share_of_the_time_may_be_used_and_is_saved_up_for_a_second_only():
    used = [5.0]
    allowance = CpuBudget(0.1, lambda: used[0])
    assert allowance.covers(100.0)
    used[0] += 0.15  # owes half a second's worth
    assert not allowance.covers(100.1)
    assert not allowance.covers(100.3)
    assert allowance.covers(100.7)
    assert allowance.covers(900.0)
    used[0] += 0.11
    assert not allowance.covers(900.01)


def test_without_a_share_nothing_is_covered():
    allowance = CpuBudget(0.0, lambda: 0.0)
    assert not allowance.covers(1.0)
    assert not allowance.covers(1000.0)
