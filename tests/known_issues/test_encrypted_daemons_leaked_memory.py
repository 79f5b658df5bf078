"""With a key, exchange daemons kept the memory of every message that they sent: gigabytes within minutes.

The buffer of a model's last, shorter chunk was on top of the free list, so the other buffers were never reused.
"""

import psutil
import pytest
import torch
from support import wait_until

from benchmarks.peers.starling import exchange_config
from training.coordinator.membership import Member, View
from training.exchange import ExchangeSetup, build_exchange
from training.processes.keys import RingKey

SIZE = 500_001  # 2 MB, and a last chunk that is shorter


@pytest.fixture
def pair(tmp_path):
    key = RingKey.generate()
    cfg, gossip = exchange_config({"timeout_s": 20.0, "per_step": 1, "encrypt": True})
    exchanges = [build_exchange(cfg, ExchangeSetup(n, 0, SIZE, key, tmp_path, gossip=gossip)) for n in range(2)]
    yield exchanges
    for exchange in exchanges:
        exchange.close()


def test_memory_does_not_grow_with_the_number_of_exchanges(pair):
    live = [torch.rand(SIZE) for _ in pair]
    view = View(1, tuple(Member(n, f"once-{n}", (exchange.endpoint,)) for n, exchange in enumerate(pair)))
    for exchange, weights in zip(pair, live, strict=True):
        exchange.start(weights, 0)
        exchange.set_view(view)
    step = 0

    def exchanged(wanted):
        nonlocal step
        step += 1
        for exchange, weights in zip(pair, live, strict=True):
            if exchange.ready():
                weights += exchange.take()
                exchange.release()
            exchange.give(weights, step)
            exchange.tick(step)
        return min(exchange.stats().finished for exchange in pair) >= wanted

    def memory():
        return max(psutil.Process(exchange.pid).memory_info().rss for exchange in pair)

    wait_until(lambda: exchanged(10), every_s=0.002)
    before = memory()
    wait_until(lambda: exchanged(60), every_s=0.002)
    assert memory() - before < 40e6  # fifty exchanges are 100 MB
