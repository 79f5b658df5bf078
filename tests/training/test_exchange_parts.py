"""Exchanges of several ranks, daemons and exchanges per step, and settings that Gloo refuses."""

import pytest
import torch
from exchange_ring import CONFIG, SIZE, Ring
from support import wait_until

from benchmarks.peers.starling import exchange_config
from training.coordinator.membership import Member, View
from training.exchange import ExchangeSetup, ExchangeStats, build_exchange
from training.exchange.client import combined


def test_cpu_share_limits_exchanges_per_step(tmp_path):
    for share, wanted in ((1.0, 3), (0.0, 1)):
        cfg, gossip = exchange_config(CONFIG | {"encrypt": False, "per_step": 3, "cpu_share": share})
        ring = Ring(build_exchange(cfg, ExchangeSetup(n, 0, SIZE, None, tmp_path, gossip=gossip)) for n in range(2))
        try:
            ring.start()
            ring.loaded()
            ring.join()
            asker = ring.exchanges[0]
            for step in range(3):
                asker.tick(step)
                wait_until(lambda: asker.stats().finished >= wanted * (step + 1), every_s=0.01)  # noqa: B023
            ring.rest()
            assert asker.stats().finished == 3 * wanted
        finally:
            for exchange in ring.exchanges:
                exchange.close()


def test_ranks_average_with_the_same_rank_of_other_nodes(tmp_path):
    cfg, gossip = exchange_config(CONFIG | {"encrypt": False})
    setups = {(n, r): ExchangeSetup(n, r, SIZE, None, tmp_path, gossip=gossip) for n in (0, 1) for r in (0, 1)}
    made = {place: build_exchange(cfg, setup) for place, setup in setups.items()}
    try:
        view = View(1, tuple(Member(n, "x", (made[n, 0].endpoint, made[n, 1].endpoint)) for n in (0, 1)))
        live = {key: torch.full((SIZE,), 10.0 * key[1] + key[0]) for key in made}
        for key, exchange in made.items():
            exchange.set_view(view)
            exchange.start(live[key], 0)

        def have_ranks_converged():
            for key, exchange in made.items():
                if exchange.ready():
                    live[key] += exchange.take()
                    exchange.release()
                exchange.give(live[key], 1)
                exchange.tick(1)
            return all(abs(float(live[n, r][0]) - (10 * r + 0.5)) < 1e-3 for n, r in made)

        wait_until(have_ranks_converged, every_s=0.01)
    finally:
        for exchange in made.values():
            exchange.close()


def test_two_daemons_average_like_one(tmp_path):
    cfg, gossip = exchange_config(CONFIG | {"encrypt": False, "daemons": 2})
    ring = Ring(build_exchange(cfg, ExchangeSetup(n, 0, SIZE, None, tmp_path, gossip=gossip)) for n in range(2))
    try:
        ring.start()
        ring.loaded()
        ring.join()
        total = ring.total()
        asker = ring.exchanges[0]
        asker._exchanges[0].tick(1)
        wait_until(lambda: asker.stats().finished == 1, every_s=0.01)
        second = ring.live[0][SIZE // 2 :].clone()
        # a daemon on a busy machine may be too late with a part for the first update
        wait_until(lambda: ring.take(0) or ring.live[0][0] == 0.5, every_s=0.01)
        assert torch.equal(ring.live[0][SIZE // 2 :], second)
        asker._exchanges[1].tick(1)
        wait_until(lambda: asker.stats().finished == 2, every_s=0.01)
        wait_until(lambda: ring.take(0) or ring.take(1) or ring.spread() == 0, every_s=0.01)
        assert torch.equal(ring.total(), total)
        stats = asker.stats()
        assert (stats.finished, stats.failed, stats.bytes_sent) == (2, 0, 4 * SIZE)
        assert sorted(path.name for path in tmp_path.glob("*.log")) == [
            f"exchange-{n}.{part}.log" for n in (0, 1) for part in (0, 1)
        ]
    finally:
        for exchange in ring.exchanges:
            exchange.close()
    assert not asker.alive()
    with pytest.raises(ValueError, match="use daemons=1"):
        build_exchange(cfg, ExchangeSetup(0, 0, 1, None, tmp_path))


def test_statistics_of_parts_are_combined():
    first = ExchangeStats(5, 4, 3, 1, 2, 6, 0.5, 1.0, 100, 200, 3.0, 1.0, 0.25, 0.1, 7)
    second = ExchangeStats(2, 1, 4, 1, 0, 1, 0.7, 6.0, 10, 20, 4.0, 2.0, 0.5, 0.3, 8)
    assert combined([first]) == first
    both = ExchangeStats(7, 5, 7, 2, 2, 7, 0.7, 2.0, 110, 220, 12.5**0.5, 2.0, 0.75, 0.3, 8)
    assert combined([first, second]) == both
    assert combined([ExchangeStats()]) == ExchangeStats()
