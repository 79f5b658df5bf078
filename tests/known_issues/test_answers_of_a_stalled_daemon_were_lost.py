"""A daemon that stalled until it was asked again on another connection answered the old requests afterwards: it
had added its half of the difference, and the asker, who had closed the old connection, had not.
"""

import os
import signal

import pytest
import torch
from support import wait_until

from training.coordinator.membership import Member, View
from training.exchange import ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.processes.keys import RingKey

SIZE = 5000


@pytest.fixture
def pair(key, tmp_path):
    cfg = ExchangeConfig.model_validate({"chunk_kb": 16, "timeout_s": 0.2, "encrypt": key is not None})
    ends = [build_exchange(cfg, ExchangeSetup(node, 0, SIZE, key, tmp_path)) for node in range(2)]
    for end in ends:
        end.set_view(
            View(1, tuple(Member(node, f"m{node}", (member_end.endpoint,)) for node, member_end in enumerate(ends)))
        )
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize(("key", "sent"), [(None, 3), (RingKey.generate(), 1)], ids=["clear", "encrypted"])
def test_sum_of_weights_is_kept_when_a_stalled_daemon_resumes(pair, sent):
    weights = [torch.full((SIZE,), float(node + 1)) for node in range(2)]
    for end, mine in zip(pair, weights, strict=True):
        end.start(mine, 0)
    steps = drifted = 0

    def work(drifts=True):
        """A step of both; the first one's weights drift away, so that there is a difference to be averaged."""
        nonlocal steps, drifted
        steps += 1
        for end, mine in zip(pair, weights, strict=True):
            if end.ready():
                mine += end.take()
                end.release()
            if drifts and end is pair[0]:
                mine += 1.0
                drifted += 1
            end.give(mine, steps)
            if drifts and end is pair[0]:
                end.tick(steps)

    def sum_error():
        return abs(float(sum(mine.double().mean() for mine in weights)) - (3.0 + drifted))

    wait_until(lambda: work() or pair[0].stats().finished > 2, every_s=0.01)
    os.kill(pair[1].pid, signal.SIGSTOP)
    try:
        failed = pair[0].stats().failed
        wait_until(lambda: work() or pair[0].stats().failed >= failed + 4, every_s=0.01)
        received = pair[1].stats().bytes_received
    finally:
        os.kill(pair[1].pid, signal.SIGCONT)
    # it has three exchanges to answer, one on each connection, and what is left of one that it was stopped in;
    # encrypted ones send nothing before it has agreed on keys
    wait_until(lambda: work(drifts=False) or pair[1].stats().bytes_received >= received + sent * 4 * SIZE, every_s=0.01)
    wait_until(lambda: work(drifts=False) or sum_error() < 0.05, every_s=0.01)
