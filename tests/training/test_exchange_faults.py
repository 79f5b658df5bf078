"""The ZeroMQ exchange under kill -9, SIGSTOP, wrong keys and garbage, and over a longer emulated training."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import zmq
from forks import Forkable
from support import ROOT, end_processes, processes_naming, wait_until

from benchmarks.peers.starling import exchange_config
from training.coordinator.membership import Member, View
from training.exchange import ExchangeSetup, PortTakenError, build_exchange
from training.exchange.config import ExchangeConfig
from training.exchange.messages import AVERAGE, OK, Header, unpack
from training.processes.keys import RingKey

SIZE = 50_000  # 13 chunks of 16 KiB


def build(node, folder, key=None, seed=0, bind_host="127.0.0.1", size=SIZE, **config):
    cfg, gossip = exchange_config({"chunk_kb": 16, "timeout_s": 0.5, "encrypt": key is not None} | config)
    return build_exchange(cfg, ExchangeSetup(node, 0, size, key, folder, bind_host, seed=seed, gossip=gossip))


def view_of(exchanges, number=1, nodes=None):
    nodes = range(len(exchanges)) if nodes is None else nodes
    return View(number, tuple(Member(n, f"once-{n}", (exchanges[n].endpoint,)) for n in nodes))


class EmulatedTraining:
    """An emulated training process: its weights drift towards its own target."""

    def __init__(self, number, exchange, size=SIZE):
        torch.manual_seed(number)
        self.exchange = exchange
        self.target = torch.full((size,), float(number))
        self.live = torch.randn(size)
        self.exact = self.live.double()  # initial weights and all gradient steps
        self.steps = 0
        self.slowest = 0.0
        exchange.start(self.live, 0)

    def work(self, rate=0.02, tick=True):
        started = time.monotonic()
        if self.exchange.ready():
            self.live += self.exchange.take()
            self.exchange.release()
        if rate:
            update = rate * (self.target - self.live)
            self.live += update
            self.exact += update.double()
            self.steps += 1
        self.exchange.give(self.live, self.steps)
        if tick:
            self.exchange.tick(self.steps)
        self.slowest = max(self.slowest, time.monotonic() - started)


def deviation_of_sum(loops):
    """How far the sum over learners is from initial weights plus gradient steps."""
    return float((sum(loop.live.double() for loop in loops) - sum(loop.exact for loop in loops)).abs().max())


def has_settled(loops):
    for loop in loops:
        loop.work(rate=0, tick=False)
    return deviation_of_sum(loops) < 1e-3


def spread(loops):
    live = torch.stack([loop.live for loop in loops])
    return float((live - live.mean(0)).square().mean().sqrt())


def fetched(exchange):
    """A neighbour's weights; a neighbour that a busy machine has stopped for a moment is asked again."""
    return wait_until(lambda: (weights := exchange.fetch(10)) is not None and [weights])[0]


@pytest.fixture
def ring(tmp_path):
    """Makes rings that end with the test."""
    made = []

    def make(count, **config):
        start = len(made)
        made.extend(build(n, tmp_path, **config) for n in range(count))
        for exchange in made[start:]:
            exchange.set_view(view_of(made[start:]))
        return made[start:]

    yield make
    for exchange in made:
        exchange.close()


@pytest.mark.parametrize(("neighbours", "wire"), [("ring", "fp32"), ("random-ring", "bf16")])
@pytest.mark.variants(1)
def test_four_drifting_learners_stay_close_and_conserve_the_sum(ring, neighbours, wire):
    size = 20_000  # five chunks
    exchanges = ring(4, size=size, neighbours=neighbours, wire=wire, timeout_s=60.0)
    loops = [EmulatedTraining(n, exchange, size) for n, exchange in enumerate(exchanges)]
    distances, told = [], []

    def finished():
        return [loop.exchange.stats().finished for loop in loops]

    before = finished()
    for step in range(150):
        for loop in loops:
            loop.work()
        distances.append(spread(loops))
        told.append([loop.exchange.stats().distance for loop in loops])
        if step % 3 == 2:  # on a busy machine, emulated steps would leave the exchanges behind
            wait_until(lambda: all(now > then for now, then in zip(finished(), before, strict=True)), every_s=0.002)  # noqa: B023
            before = finished()
    # without exchanges each would be at its own target: a spread of 1.1
    assert max(distances[50:]) < 0.4
    wait_until(lambda: has_settled(loops), every_s=0.05)
    mean = torch.stack([loop.live for loop in loops]).mean(0)
    assert torch.allclose(mean, torch.full((size,), 1.5), atol=0.25)  # the common optimum
    stats = [loop.exchange.stats() for loop in loops]
    assert not sum(s.failed for s in stats)
    # after a second exchange in a step, two neighbours may be equal to the bit
    assert all(max(of_one) > 0 and max(of_one[50:]) < 1 for of_one in zip(*told, strict=True))
    assert all(s.cpu_seconds > 0 and s.mean_s > 0 for s in stats)


def test_stopped_peer_delays_no_other_and_late_answers_conserve_the_sum(ring):
    loops = [EmulatedTraining(n, exchange) for n, exchange in enumerate(ring(3))]
    wait_until(
        lambda: [loop.work() for loop in loops] and all(loop.exchange.stats().answered for loop in loops), every_s=0.01
    )
    os.kill(loops[1].exchange.pid, signal.SIGSTOP)
    try:
        before = [loop.exchange.stats() for loop in loops]

        def others_exchange():
            for loop in loops:  # its training process continues, too
                loop.work()
            now = [loops[n].exchange.stats() for n in (0, 2)]
            return all(
                s.failed > before[n].failed and s.answered > before[n].answered + 5
                for n, s in zip((0, 2), now, strict=True)
            )

        wait_until(others_exchange, every_s=0.01)
        wait_until(lambda: loops[1].exchange.stats().silent_s > 0.2)
        assert not loops[1].exchange.give(loops[1].live, 0)  # the slot is full, and nothing waits
    finally:
        os.kill(loops[1].exchange.pid, signal.SIGCONT)
    wait_until(lambda: has_settled(loops), every_s=0.05)
    answered = loops[1].exchange.stats().answered
    wait_until(lambda: [loop.work() for loop in loops] and loops[1].exchange.stats().answered > answered, every_s=0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_daemon_leaves_signals_to_its_training_process(ring, number):
    """Ctrl-C, Slurm and systemd signal all processes at once; the learner still has to leave the ring."""
    loops = [EmulatedTraining(n, exchange) for n, exchange in enumerate(ring(2))]
    os.kill(loops[1].exchange.pid, number)
    wait_until(
        lambda: [loop.work() for loop in loops] and all(loop.exchange.stats().answered for loop in loops), every_s=0.01
    )
    assert loops[1].exchange.alive()


def test_killed_daemon_is_detected_by_its_learner_and_skipped_by_others(ring):
    loops = [EmulatedTraining(n, exchange) for n, exchange in enumerate(ring(3))]
    wait_until(
        lambda: [loop.work() for loop in loops] and all(loop.exchange.stats().answered for loop in loops), every_s=0.01
    )
    dead = loops.pop(1)
    os.kill(dead.exchange.pid, signal.SIGKILL)
    wait_until(lambda: not dead.exchange.alive(), every_s=0.01)
    for _ in range(20):
        dead.work()  # trains on, alone
    wait_until(lambda: [loop.work() for loop in loops] and loops[0].exchange.stats().failed, every_s=0.01)
    count = loops[0].exchange.stats().answered
    wait_until(lambda: [loop.work() for loop in loops] and loops[0].exchange.stats().answered > count + 3, every_s=0.01)


def test_peer_killed_during_an_exchange_leaves_survivors_intact(ring):
    loops = [EmulatedTraining(n, exchange, 2_000_000) for n, exchange in enumerate(ring(2, size=2_000_000))]
    for _ in range(5):
        for loop in loops:
            loop.work()
    os.kill(loops[1].exchange.pid, signal.SIGKILL)
    survivor = loops[0]
    wait_until(lambda: survivor.work() or survivor.exchange.stats().failed, every_s=0.01)
    for _ in range(5):
        survivor.work()
    assert survivor.exchange.alive()
    assert torch.isfinite(survivor.live).all()


def test_node_that_rejoins_with_a_new_incarnation_is_averaged_again(ring, tmp_path):
    exchanges = ring(2)
    loops = [EmulatedTraining(n, exchange) for n, exchange in enumerate(exchanges)]
    wait_until(lambda: [loop.work() for loop in loops] and loops[0].exchange.stats().answered, every_s=0.01)
    os.kill(exchanges[1].pid, signal.SIGKILL)
    with_new = build(1, tmp_path)
    try:
        members = (Member(0, "once-0", (exchanges[0].endpoint,)), Member(1, "twice-1", (with_new.endpoint,)))
        for exchange in (exchanges[0], with_new):
            exchange.set_view(View(3, members))
        weights = fetched(with_new)
        loops[1] = EmulatedTraining(1, with_new)
        loops[1].live.copy_(weights)
        with_new.start(loops[1].live, 0)
        answered = loops[0].exchange.stats().answered
        wait_until(
            lambda: [loop.work() for loop in loops] and loops[0].exchange.stats().answered > answered, every_s=0.01
        )
    finally:
        with_new.close()


def test_fetch_skips_a_stopped_neighbour_and_is_bounded(ring):
    exchanges = ring(3)
    loops = [EmulatedTraining(n, exchanges[n]) for n in (1, 2)]
    for loop in 2 * loops:
        wait_until(lambda: loop.exchange.give(loop.live, 0), every_s=0.01)  # noqa: B023
    os.kill(exchanges[1].pid, signal.SIGSTOP)
    try:
        assert torch.equal(fetched(exchanges[0]), loops[1].live)
        os.kill(exchanges[2].pid, signal.SIGSTOP)
        assert exchanges[0].fetch(1) is None
    finally:
        for n in (1, 2):
            os.kill(exchanges[n].pid, signal.SIGCONT)


def test_messages_of_a_peer_with_another_key_are_ignored(ring, tmp_path):
    exchanges = [build(n, tmp_path, key=RingKey.generate()) for n in range(2)]
    try:
        loops = [EmulatedTraining(n, exchange) for n, exchange in enumerate(exchanges)]
        for exchange in exchanges:
            exchange.set_view(view_of(exchanges))
        wait_until(lambda: [loop.work() for loop in loops] and loops[0].exchange.stats().failed, every_s=0.01)
        assert not any(s.answered or s.bytes_received for s in (exchange.stats() for exchange in exchanges))
        assert exchanges[0].fetch(1) is None
    finally:
        for exchange in exchanges:
            exchange.close()


def test_encryption_needs_a_key_and_remote_access_needs_encryption(tmp_path):
    with pytest.raises(ValueError, match="key"):
        build(0, tmp_path, encrypt=True)
    with pytest.raises(Exception, match="key file"):
        build_exchange(
            ExchangeConfig(encrypt=False), ExchangeSetup(0, 0, 10, None, tmp_path, "0.0.0.0", advertise_host="example")
        )
    with pytest.raises(ValueError, match="advertise_host"):
        build(0, tmp_path, key=RingKey.generate(), bind_host="0.0.0.0")


def test_port_in_use_is_reported(tmp_path):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(PortTakenError, match="in use"):
            build(0, tmp_path, bind_host=f"127.0.0.1:{port}")
        with pytest.raises(ValueError, match="HOST:PORT"):
            build(0, tmp_path, bind_host="127.0.0.1:99999")


def test_malformed_messages_are_ignored_and_mismatched_chunks_refused(ring):
    exchanges = ring(2)
    loops = [EmulatedTraining(n, exchange) for n, exchange in enumerate(exchanges)]
    good = Header(AVERAGE, "fp32", OK, False, 1, 4096, 0, 1, 1, SIZE)
    payload = bytes(4 * 4096)
    misfits = [(good, payload[:-4]), (Header(AVERAGE, "fp32", OK, False, 1, 4096, 13, 1, 1, SIZE), payload)]
    misfits += [(Header(AVERAGE, "bf16", OK, False, 1, 4096, 0, 1, 1, SIZE), payload[: 2 * 4096])]
    misfits += [(Header(AVERAGE, "fp32", OK, False, 1, 4096, 0, 1, 1, SIZE + 1), payload)]
    misfits += [(Header(AVERAGE, "fp32", OK, False, 9, 4096, 0, 1, 0, SIZE), payload)]  # an outdated, unknown node
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(exchanges[0].endpoint)
        for parts in ([b""], [b"x" * 44, b""], [good.pack()], [good.pack(), payload, payload], [b"", b"", b"", b""]):
            socket.send_multipart(parts)
        for header, body in misfits:
            socket.send_multipart([header.pack(), body])
            assert socket.poll(240_000)
            head, rest = socket.recv_multipart()
            assert unpack(head).status != OK
            assert rest == b""
    wait_until(lambda: [loop.work() for loop in loops] and all(e.stats().answered for e in exchanges), every_s=0.01)
    wait_until(lambda: has_settled(loops), every_s=0.05)


def test_simultaneous_requests_average_instead_of_swapping(ring):
    loops = [EmulatedTraining(n, exchange) for n, exchange in enumerate(ring(2))]
    for loop in loops:
        loop.live[:] = loop.target * 100
        loop.exact = loop.live.double()

    def agree():
        for loop in loops:
            loop.exchange.tick(0)
        for loop in loops:
            loop.work(rate=0, tick=False)
        return spread(loops) < 1e-3

    wait_until(agree, every_s=0.005)
    wait_until(lambda: has_settled(loops), every_s=0.05)
    assert deviation_of_sum(loops) < 1e-3
    for loop in loops:
        torch.testing.assert_close(loop.live, torch.full_like(loop.live, 50.0), rtol=0, atol=1e-3)


def test_daemon_needs_no_torch_and_reveals_no_key(tmp_path):
    code = "import sys, training.exchange.daemon, training.exchange.daemon; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=240).returncode == 0
    key = RingKey.generate()
    exchange = build(0, tmp_path, key=key)
    try:
        shown = Path(f"/proc/{exchange.pid}/cmdline").read_bytes() + Path(f"/proc/{exchange.pid}/environ").read_bytes()
        assert key.secret not in shown
        assert key.secret not in (tmp_path / "exchange-0.0.log").read_bytes()
    finally:
        exchange.close()
    assert not Path(f"/proc/{exchange.pid}").exists()


TRAINER = """
import sys, time, torch
from pathlib import Path
from training.exchange.config import ExchangeConfig
from training.exchange import ExchangeSetup, build_exchange

folder = Path(sys.argv[1])
exchange = build_exchange(ExchangeConfig(encrypt=False), ExchangeSetup(0, 0, 1000, None, folder))
exchange.start(torch.zeros(1000), 0)
(folder / "pid").write_text(str(exchange.pid))
time.sleep(600)
"""


def test_daemon_and_its_memory_end_with_a_killed_training_process(tmp_path):
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-c", Forkable(textwrap.dedent(TRAINER)), str(tmp_path)]
    trainer = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        daemon = Path("/proc") / (tmp_path / "pid").read_text()
        assert daemon.exists()
        trainer.kill()
        trainer.wait()
        wait_until(lambda: not daemon.exists())
        assert not {path for path in Path("/dev/shm").iterdir() if "starling" in path.name} - before
    finally:
        trainer.kill()
        trainer.wait()
        end_processes(processes_naming(str(tmp_path)))


def test_closing_ends_a_stopped_daemon_in_bounded_time(tmp_path, monkeypatch):
    monkeypatch.setattr("training.exchange.client.STOP_S", 0.2)
    exchange = build(0, tmp_path)
    os.kill(exchange.pid, signal.SIGSTOP)
    closer = threading.Thread(target=exchange.close)
    closer.start()
    closer.join(240)
    assert not closer.is_alive()
    assert not exchange.alive()
