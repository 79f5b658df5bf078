"""How many exchanges end in a step, and the warning if they are too few."""

import logging

from training.node.node_exchange import ExchangeRate


def test_the_rate_is_a_mean_over_the_last_steps_and_survives_a_new_daemon():
    rate = ExchangeRate("0.0")
    for step in range(1, 41):
        rate.step(2 * step)
    assert rate.per_step == 2.0
    rate.step(0)  # a daemon that has just started
    assert 1.9 < rate.per_step < 2.0
    for _ in range(400):
        rate.step(0)
    assert rate.per_step < 0.01


def test_a_deficit_is_warned_of_once_and_after_some_steps_only(caplog):
    rate = ExchangeRate("3.1")
    with caplog.at_level(logging.WARNING):
        for step in range(1, 51):
            rate.step(step // 2)
        assert not caplog.records
        for step in range(51, 200):
            rate.step(step // 2)
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("learner 3.1 finishes 0.49 exchanges a step: ")


def test_no_warning_where_exchanges_keep_up(caplog):
    rate = ExchangeRate("0.0")
    for step in range(200):
        rate.step(step)
    assert not caplog.records
