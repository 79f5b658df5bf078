"""How many exchanges end in a step, and the warning if they are too few."""

import logging

import torch
from torch import nn

from training.node.node_exchange import ExchangeRate
from training.ring.ring import Ring


def test_rate_is_a_mean_of_recent_steps_also_after_a_daemon_restart():
    rate = ExchangeRate("0.0")
    for step in range(1, 41):
        rate.step(2 * step)
    assert rate.per_step == 2.0
    rate.step(0)  # a daemon that has just started
    assert 1.9 < rate.per_step < 2.0
    for _ in range(400):
        rate.step(0)
    assert rate.per_step < 0.01


def test_lagging_exchanges_cause_one_warning_after_some_steps(caplog):
    rate = ExchangeRate("3.1")
    with caplog.at_level(logging.WARNING):
        for step in range(1, 51):
            rate.step(step // 2)
        assert not caplog.records
        for step in range(51, 200):
            rate.step(step // 2)
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("learner 3.1 finishes 0.49 exchanges a step: ")


def test_warning_of_a_ring_names_what_its_user_configures(tmp_path, caplog):
    model = nn.Linear(3, 1)
    with Ring(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path / "ring") as ring:
        rate = ring._learner.ring.rate
    for _ in range(60):
        rate.step(0)
    (text,) = [record.getMessage() for record in caplog.records if "replicas drift apart" in record.getMessage()]
    assert "RingConfig(exchange={'wire': 'bf16'})" in text
    assert not any(name in text for name in ("train.", "exchange.wire", "h-adpsgd"))


def test_no_warning_if_exchanges_keep_up(caplog):
    rate = ExchangeRate("0.0")
    for step in range(200):
        rate.step(step)
    assert not caplog.records
