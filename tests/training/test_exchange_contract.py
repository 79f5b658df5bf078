"""The contract of every exchange, run on each of them with real threads, processes and sockets."""

import os
import signal
import time
from abc import abstractmethod
from contextlib import contextmanager

import pytest
import torch
from emulated_device import DeviceExchange, EmulatedCudaExchange
from exchange_ring import CONFIG, SIZE, Ring
from support import wait_until

from benchmarks.peers.gloo import GlooExchange
from benchmarks.peers.starling import exchange_config
from training.coordinator.membership import View
from training.exchange import ExchangeError, ExchangeSetup, build_exchange
from training.processes.keys import RingKey


class ExchangeContract:
    """The tests; an implementation says how to make its exchanges."""

    elastic = True
    meets = False  # whether both sides must have a step to give
    rounding = 0.0  # how far two learners may be apart after an averaging
    parts = 1
    chunk_of_5000 = 4096  # its first weight

    @abstractmethod
    def make(self, count, folder, **config):
        """Exchanges of `count` nodes."""

    def is_everything_ready(self, exchange):
        """Whether all averages can be taken; an update would take only the available ones."""
        return exchange.ready() and not any(box.gathered for box in self.mailboxes(exchange))

    def mailboxes(self, exchange):
        return [exchange._mailbox]

    @contextmanager
    def ring(self, count, folder, **config):
        exchanges = self.make(count, folder, **config)
        try:
            yield Ring(exchanges)
        finally:
            for exchange in exchanges:
                exchange.close()

    @pytest.mark.parametrize("count", [2, 3, 5])
    def test_ring_of_any_size_converges_and_conserves_the_sum(self, count, tmp_path):
        with self.ring(count, tmp_path) as ring:
            ring.start()
            ring.loaded()
            ring.join()
            total = ring.total()

            def agree():
                ring.work()
                return ring.spread() < 0.05

            wait_until(agree, every_s=0.01)
            wait_until(lambda: ring.settled(total), every_s=0.05)

            def adds_up():
                stats = [exchange.stats() for exchange in ring.exchanges]
                assert not any(s.failed for s in stats)
                ours, theirs = sum(s.initiated for s in stats), sum(s.answered for s in stats)
                return ours == theirs and all(s.initiated and s.bytes_sent and s.bytes_received for s in stats)

            wait_until(adds_up, every_s=0.05)

    def test_each_step_permits_one_exchange_and_unused_permits_expire(self, tmp_path):
        with self.ring(2, tmp_path) as ring:
            exchange = ring.exchanges[0]
            ring.start()
            ring.loaded()
            for step in range(5):
                exchange.tick(step)  # no node to exchange with
            ring.join()
            exchange.tick(5)
            if self.meets:
                ring.exchanges[1].tick(5)
            wait_until(exchange.ready, every_s=0.01)
            for _ in range(10):
                ring.work(tick=False)
            assert exchange.parts == self.parts
            assert exchange.stats().initiated <= 2 * self.parts
            assert ring.exchanges[1].stats().initiated == int(self.meets) * self.parts

    def test_update_includes_all_averages_finished_before_it(self, tmp_path):
        """Staleness one: also what comes after the first average, and whatever the daemon does at the time."""
        with self.ring(2, tmp_path) as ring:
            ring.start()
            ring.loaded()
            ring.join()
            for step in range(4):
                for asking in [ring.exchanges] if self.meets else [[exchange] for exchange in ring.exchanges]:
                    before = [s.finished + s.answered for s in ring.stats()]
                    for exchange in asking:
                        exchange.tick(step)
                    wait_until(
                        lambda: all(
                            s.finished + s.answered >= n + self.parts
                            for s, n in zip(ring.stats(), before, strict=True)  # noqa: B023
                        ),
                        every_s=0.002,
                    )
                    time.sleep(0.01)  # a delta handed over too early would arrive now
                for n, exchange in enumerate(ring.exchanges):
                    wait_until(lambda: self.is_everything_ready(exchange), every_s=0.002)  # noqa: B023
                    ring.take(n)
                    assert exchange.stats().staleness == 1
                assert ring.spread() <= self.rounding
                for n, exchange in enumerate(ring.exchanges):
                    ring.live[n] += n + 1
                    wait_until(lambda: exchange.give(ring.live[n], step + 1), every_s=0.002)  # noqa: B023
                    # on a busy machine, the next exchange could begin before the daemon has seen these weights
                    for box in self.mailboxes(exchange):
                        wait_until(lambda: box.snapshot_step == step + 1 and box.read == box.written, every_s=0.002)  # noqa: B023

    def test_gradient_steps_are_not_lost(self, tmp_path):
        with self.ring(3, tmp_path) as ring:
            ring.join()
            ring.start()
            total = ring.total()
            for _ in range(60):
                for n, live in enumerate(ring.live):
                    live += n + 1
                    total += n + 1
                ring.work()
            wait_until(lambda: ring.settled(total), every_s=0.05)

    def test_single_learner_trains_without_exchanges(self, tmp_path):
        with self.ring(1, tmp_path) as ring:
            ring.join()
            ring.start()
            for _ in range(20):
                ring.work()
            assert ring.exchanges[0].alive()
            assert not ring.exchanges[0].ready()
            assert ring.exchanges[0].stats().failed == 0

    def test_nan_weights_do_not_spread(self, tmp_path):
        with self.ring(2, tmp_path) as ring:
            ring.live[1][5000] = float("nan")
            ring.join()
            ring.start()
            first, second = ring.exchanges

            def skipped():
                ring.work()
                return first.stats().skipped_nonfinite and second.stats().skipped_nonfinite

            wait_until(skipped, every_s=0.01)
            wait_until(
                lambda: ring.work() or float((ring.live[0][:4096] - ring.live[1][:4096]).norm()) < 0.1, every_s=0.01
            )
            assert torch.isfinite(ring.live[0]).all()
            begin = self.chunk_of_5000
            assert ring.live[0][begin] == begin % 7  # the whole chunk is left as it was

    def test_new_weights_replace_the_old_ones(self, tmp_path):
        with self.ring(2, tmp_path) as ring:
            ring.join()
            ring.start()
            total = ring.total()
            wait_until(lambda: ring.work() or ring.spread() < 0.05, every_s=0.01)
            ring.rest()  # an exchange under way would bring something of the old weights to the new ones
            wait_until(lambda: ring.settled(total), every_s=0.05)
            for n in range(2):
                ring.live[n] = torch.full((SIZE,), 100.0 + n)
            ring.start()
            ring.loaded()
            wait_until(lambda: ring.work() or ring.spread() < 0.05, every_s=0.01)
            assert torch.allclose(torch.stack(ring.live).mean(0), torch.tensor(100.5), atol=0.2)

    def test_weights_of_wrong_size_are_refused(self, tmp_path):
        with self.ring(1, tmp_path) as ring:
            with pytest.raises(ValueError, match="contiguous fp32"):
                ring.exchanges[0].start(torch.zeros(3), 0)
            with pytest.raises(ExchangeError, match="start"):
                ring.exchanges[0].give(torch.zeros(SIZE), 0)
            with pytest.raises(ExchangeError, match="ready"):
                ring.exchanges[0].take()

    def test_closed_exchange_is_not_alive_and_ignores_calls(self, tmp_path):
        with self.ring(2, tmp_path) as ring:
            ring.join()
            ring.start()
            exchange = ring.exchanges[0]
            wait_until(lambda: ring.work() or exchange.stats().initiated, every_s=0.01)
            assert exchange.alive()
            exchange.close()
            exchange.close()
            assert not exchange.alive()
            exchange.tick(9)
            exchange.set_view(View())
            assert not exchange.ready()
            assert exchange.stats().initiated

    def test_a_newcomer_gets_a_neighbours_weights(self, tmp_path):
        if not self.elastic:
            pytest.skip("a fixed ring has no newcomers")
        with self.ring(3, tmp_path) as ring:
            ring.join([0, 1])
            ring.start([0, 1])
            newcomer = ring.exchanges[2]
            newcomer.set_view(ring.view)
            ring.loaded([0, 1])
            weights = newcomer.fetch(60.0)
            assert any(torch.equal(weights, ring.live[n]) for n in range(2))
            ring.live[2] = weights
            ring.start([2])
            ring.join([0, 1, 2], 2)
            total = ring.total()
            wait_until(lambda: ring.work() or (ring.spread() < 0.05 and newcomer.stats().answered), every_s=0.01)
            wait_until(lambda: ring.settled(total), every_s=0.05)

    def test_fetch_returns_none_if_no_neighbour_has_finite_weights(self, tmp_path):
        if not self.elastic:
            pytest.skip("a fixed ring has no newcomers")
        with self.ring(2, tmp_path) as ring:
            assert ring.exchanges[0].fetch(0.5) is None  # no view
            ring.join()
            assert ring.exchanges[0].fetch(1.0) is None  # the other has none either
            ring.live[1][7] = float("inf")
            ring.start([1])
            ring.loaded([1])
            assert ring.exchanges[0].fetch(1.0) is None  # not these

    def test_lost_peer_causes_a_failure_and_the_ring_closes(self, tmp_path):
        if not self.elastic:
            pytest.skip("a fixed ring ends with its first loss")
        with self.ring(3, tmp_path, timeout_s=1.0) as ring:
            ring.join()
            ring.start()
            wait_until(lambda: ring.work() or ring.exchanges[0].stats().answered, every_s=0.01)
            ring.exchanges[1].close()
            others = [0, 2]
            wait_until(lambda: ring.work(others) or ring.exchanges[0].stats().failed, every_s=0.01)
            ring.live[2] += 3
            ring.join(others, 2)
            wait_until(lambda: ring.work(others) or ring.spread(others) < 0.05, every_s=0.01)


class TestZmq(ExchangeContract):
    key = None

    def make(self, count, folder, **config):
        cfg, gossip = exchange_config(CONFIG | {"encrypt": self.key is not None} | config)
        made = []
        try:
            for n in range(count):
                made.append(build_exchange(cfg, ExchangeSetup(n, 0, SIZE, self.key, folder, gossip=gossip)))
        except BaseException:
            for exchange in made:
                exchange.close()
            raise
        return made


@pytest.mark.slow
class TestZmqOfADevice(TestZmq):
    """Weights on a device, whose copies take a while."""

    def is_everything_ready(self, exchange):
        return super().is_everything_ready(exchange) and exchange._mailbox.offered == exchange._mailbox.released

    def make(self, count, folder, **config):
        cfg, gossip = exchange_config(CONFIG | {"encrypt": False} | config)
        return [DeviceExchange(cfg, ExchangeSetup(n, 0, SIZE, None, folder, gossip=gossip)) for n in range(count)]


class TestCudaOfAnEmulatedDevice(TestZmq):
    """Weights stay in memory of a device that all learners can read."""

    def is_everything_ready(self, exchange):
        return exchange.ready()

    def make(self, count, folder, **config):
        cfg, gossip = exchange_config(CONFIG | {"kind": "cuda", "encrypt": self.key is not None} | config)
        made = []
        for n in range(count):
            made.append(EmulatedCudaExchange(cfg, ExchangeSetup(n, 0, SIZE, self.key, folder, gossip=gossip)))
        return made


class TestCudaSecureRandomRing(TestCudaOfAnEmulatedDevice):
    key = RingKey.generate()

    def make(self, count, folder, **config):
        return super().make(count, folder, neighbours="random-ring", **config)


class TestZmqSecureBf16RandomRing(TestZmq):
    key = RingKey.generate()
    rounding = 0.1

    def make(self, count, folder, **config):
        return super().make(count, folder, neighbours="random-ring", wire="bf16", **config)


@pytest.mark.slow
class TestZmqSeveral(TestZmq):
    """Each learner's weights in two parts, which two daemons average."""

    key = RingKey.generate()
    parts = 2
    chunk_of_5000 = 5000

    def mailboxes(self, exchange):
        return [part._mailbox for part in exchange._exchanges]

    def make(self, count, folder, **config):
        return super().make(count, folder, daemons=2, **config)


@pytest.mark.slow
class TestGloo(ExchangeContract):
    elastic = False
    meets = True

    def make(self, count, folder, **config):
        cfg, gossip = exchange_config(CONFIG | {"encrypt": False} | config)
        setups = [ExchangeSetup(n, 0, SIZE, None, folder, gossip=gossip) for n in range(count)]
        return [GlooExchange(cfg, setup, str(folder / "meet"), count) for setup in setups]

    def test_a_lost_neighbour_ends_the_ring_but_not_training(self, tmp_path):
        with self.ring(3, tmp_path) as ring:
            ring.start()
            ring.loaded()
            wait_until(lambda: ring.work() or all(e.stats().finished for e in ring.exchanges), every_s=0.01)
            os.kill(ring.exchanges[1].pid, signal.SIGKILL)
            others = [0, 2]
            wait_until(lambda: ring.work(others) or not any(ring.exchanges[n].alive() for n in others), every_s=0.01)
            ring.work(others)
            assert all(torch.isfinite(ring.live[n]).all() for n in others)
