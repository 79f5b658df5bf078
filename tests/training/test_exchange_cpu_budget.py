"""How much processor time exchanges beyond the first one of a step may take."""

from training.exchange.daemon import CpuBudget


def test_cpu_share_accumulates_for_at_most_one_second():
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


def test_zero_share_allows_no_further_exchange():
    allowance = CpuBudget(0.0, lambda: 0.0)
    assert not allowance.covers(1.0)
    assert not allowance.covers(1000.0)
