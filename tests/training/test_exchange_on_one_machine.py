"""The exchange of learners whose weights stay on a device: processes on an emulated device, and on a GPU if any.

The contract of all exchanges is in `test_exchange_contract.py`.
"""

import logging
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from emulated_device import EmulatedCopies, EmulatedCudaExchange, SharedFiles
from exchange_ring import CONFIG, SIZE, Ring
from peer_learners import peer_ring
from support import wait_until

from benchmarks.peers.starling import exchange_config
from training.config import TrainConfig
from training.exchange import ExchangeSetup, build_exchange, cuda_exchange
from training.exchange.config import ExchangeConfig
from training.exchange.cuda_exchange import PeerAverager, PeerMover
from training.exchange.device import CopyEvent, PeerMemoryError, unshared
from training.exchange.mailbox import Mailbox
from training.exchange.messages import NOT_READY, OK, UNREADABLE
from training.node import run_rank

MESSAGE = 1024


@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_sides_add_the_same_difference_bit_for_bit(device, tmp_path):
    with peer_ring(2, device, tmp_path) as ring:
        before = ring.weights()
        ring.do("tick", nodes=[0])
        wait_until(lambda: ring.do("take")[0].finished, every_s=0.02)
        ring.do("take")
        delta, other_delta = ring.deltas()
        assert torch.equal(delta, -other_delta)
        first, second = before.float()
        assert torch.equal(delta, (second - first) / 2)
        assert torch.equal(ring.weights(), (before.float() + torch.stack([delta, other_delta])).double())


def check_that_the_sum_is_conserved(ring):
    """While all train."""
    total, steps = ring.weights().sum(0), 0
    gradient = 0.75 / len(ring.all)

    def all_have_exchanged():
        nonlocal steps
        steps += 20
        stats = ring.do("steps", 20, gradient)
        assert all(s.staleness >= 1 for s in stats if s.staleness)
        assert all(s.bytes_sent <= MESSAGE * (s.initiated + s.answered) for s in stats)
        return all(s.finished and s.answered for s in stats)

    wait_until(all_have_exchanged, every_s=0.01)

    def conserved():
        ring.do("steps", 1, 0.0, False)
        return torch.allclose(ring.weights().sum(0), total + 0.75 * steps, rtol=0, atol=1e-3)

    wait_until(conserved, every_s=0.05)


def check_that_a_stopped_learner_stops_no_other(ring):
    """Its late answers are averaged, too: the sum is conserved."""
    *others, last = ring.all
    total = ring.weights().sum(0)
    wait_until(lambda: all(s.finished for s in ring.do("steps", 5, 0.0)), every_s=0.01)
    failed = sum(s.failed for s in ring.do("take", nodes=others))
    ring.processes[last].send_signal(signal.SIGSTOP)
    wait_until(lambda: sum(s.failed for s in ring.do("steps", 20, 0.0, nodes=others)) > failed, every_s=0.01)
    ring.processes[last].send_signal(signal.SIGCONT)

    def conserved():
        ring.do("steps", 1, 0.0, False)
        return torch.allclose(ring.weights().sum(0), total, rtol=0, atol=1e-3)

    wait_until(conserved, every_s=0.05)
    before = [s.finished for s in ring.do("take")]
    wait_until(lambda: all(s.finished > n for s, n in zip(ring.do("steps", 5, 0.0), before, strict=True)), every_s=0.01)


def check_that_a_killed_learner_stops_no_other(ring):
    *others, last = ring.all
    wait_until(lambda: all(s.finished for s in ring.do("steps", 10, 0.01)), every_s=0.01)
    for node in ring.all:
        ring.tell(node, "steps", 400, 0.01)
    time.sleep(0.2)
    failed = 0
    ring.processes[last].kill()
    for node in others:
        failed += ring.hear(node).failed  # its steps have ended

    def one_has_noticed():
        return sum(s.failed for s in ring.do("steps", 10, 0.01, nodes=others)) > failed

    wait_until(one_has_noticed, every_s=0.01)
    before = [s.finished for s in ring.do("take", nodes=others)]
    ring.join(others, 2)

    def go_on():
        stats = ring.do("steps", 10, 0.0, nodes=others)
        return all(s.finished > n for s, n in zip(stats, before, strict=True))

    wait_until(go_on, every_s=0.01)
    assert torch.isfinite(ring.weights(others)).all()


@pytest.mark.parametrize(
    ("check", "count"),
    [
        (check_that_the_sum_is_conserved, 3),
        (check_that_a_stopped_learner_stops_no_other, 2),
        (check_that_a_killed_learner_stops_no_other, 3),
    ],
)
@pytest.mark.variants(1)
def test_learners_go_on_without_each_other_and_conserve_the_sum(check, count, tmp_path):
    with peer_ring(count, "emulated", tmp_path, timeout_s=0.5) as ring:
        check(ring)


@pytest.mark.gpu
def test_learners_on_a_gpu_go_on_without_each_other_and_conserve_the_sum(tmp_path):
    with peer_ring(3, "cuda", tmp_path, timeout_s=0.5) as ring:
        check_that_the_sum_is_conserved(ring)
        check_that_a_stopped_learner_stops_no_other(ring)
        check_that_a_killed_learner_stops_no_other(ring)


def test_weights_that_are_not_finite_do_not_spread(tmp_path):
    with peer_ring(2, "emulated", tmp_path) as ring:
        ring.do("spoil", 5000, nodes=[1])
        # the first weights, without the NaN, were given at the start
        ring.do("steps", 1, 0.0, False)
        ring.do("steps", 1, 0.0, False)
        wait_until(lambda: all(s.skipped_nonfinite for s in ring.do("steps", 5, 0.0)), every_s=0.01)
        mine, theirs = ring.weights()
        assert torch.isfinite(mine).all()
        assert torch.isnan(theirs).sum() == 1


# --- both sides in one process


class Side:
    """Both sides of an exchange on the emulated device, and the live weights."""

    def __init__(self, live):
        self.live, self.copies = live, EmulatedCopies()
        self.mailbox = Mailbox(-1, len(live))
        self.averager = PeerAverager(self.mailbox, 4)
        self.averager.attach(live, SharedFiles(), self.copies)
        self.mover = PeerMover(self.mailbox, lambda: None, self.averager, self.copies)
        self.mover.restart()
        self.give()

    def give(self):
        self.mover.give(self.live, 0)
        self.averager.poll()

    def take(self):
        if self.mover.ready():
            self.live += self.mover.take()
            self.mover.release()

    def request(self):
        message = bytearray(MESSAGE)
        self.averager.ask(0, message)
        return message

    def answer(self, message):
        reply = bytearray(message)
        self.averager.answer(0, reply, reply)
        return reply


@pytest.fixture
def sides():
    return [Side(torch.arange(10.0) * 64), Side(torch.arange(10.0).flip(0) * 64)]


def test_second_exchange_of_a_step_starts_from_the_average_of_the_first(sides):
    asker, neighbour = sides
    mean = (asker.live + neighbour.live) / 2
    three = Side(torch.zeros(10))
    sent = asker.request()
    asker.averager.settle(0, sent, neighbour.answer(sent), 0)
    sent = three.request()
    three.averager.settle(0, sent, asker.answer(sent), 0)
    for side in (asker, neighbour, three):
        side.take()
    assert torch.equal(neighbour.live, mean)
    assert torch.equal(asker.live, mean / 2)
    assert torch.equal(three.live, mean / 2)


def test_average_between_taking_and_giving_starts_from_the_weights_with_the_delta(sides):
    asker, neighbour = sides
    sent = asker.request()
    asker.averager.settle(0, sent, neighbour.answer(sent), 0)
    asker.take()  # its snapshot lacks what it has taken
    three = Side(torch.zeros(10))
    sent = three.request()
    three.averager.settle(0, sent, asker.answer(sent), 0)
    three.take()
    assert torch.equal(three.live, asker.live / 2)


def test_snapshots_given_during_an_exchange_do_not_change_what_the_neighbour_reads(sides):
    asker, neighbour = sides
    first, mean = asker.live.clone(), (asker.live + neighbour.live) / 2
    sent = asker.request()
    for _ in range(6):
        asker.live += 64
        asker.give()
    reply = neighbour.answer(sent)
    asker.averager.settle(0, sent, reply, 0)
    asker.take()
    neighbour.take()
    assert torch.equal(neighbour.live, mean)
    assert torch.equal(asker.live, first + 6 * 64 + (mean - first))


def test_memory_of_an_answer_is_kept_until_the_asker_has_read_it(sides):
    asker, neighbour = sides
    replies = [neighbour.answer(asker.request()) for _ in range(cuda_exchange._MOST_ANSWERS)]
    assert neighbour.averager.refusal(asker.request()) == NOT_READY
    neighbour.averager.release(replies[3])
    assert neighbour.averager.refusal(asker.request()) == OK
    before = neighbour.averager._open(cuda_exchange._read(replies[0])["memory"]).clone()
    neighbour.answer(asker.request())
    assert neighbour.averager.refusal(asker.request()) == NOT_READY
    assert torch.equal(neighbour.averager._open(cuda_exchange._read(replies[0])["memory"]), before)


def test_answer_that_was_read_too_late_is_left_out(sides, monkeypatch, caplog):
    asker, neighbour = sides
    sent, now = asker.request(), time.monotonic()
    reply = neighbour.answer(sent)
    monkeypatch.setattr(cuda_exchange.time, "monotonic", lambda: now + 1.1 * cuda_exchange._READ_S)
    assert neighbour.averager._free_answer() is not None
    assert not neighbour.averager._answers[0].is_free(time.monotonic())
    asker.averager.settle(0, sent, reply, 0)
    assert not asker.mover.ready()
    assert "too late" in caplog.text


def test_averages_with_weights_from_before_a_restart_are_dropped(sides):
    asker, neighbour = sides
    sent = asker.request()
    reply = neighbour.answer(sent)
    asker.mover.restart()
    neighbour.mover.restart()
    asker.averager.settle(0, sent, reply, 0)
    assert not asker.mover.ready()
    assert not neighbour.mover.ready()


@pytest.mark.parametrize("garbage", [b"", b"null", b"[1]", b'{"memory": 3}', b"\xff" * 8, b'{"memory": {}}'])
def test_malformed_messages_are_refused(sides, garbage):
    asker, neighbour = sides
    message = garbage.ljust(MESSAGE)
    assert neighbour.averager.refusal(message) != OK
    neighbour.averager.release(message)
    asker.averager.settle(0, asker.request(), message, 0)
    assert not asker.mover.ready()


class Unreadable(SharedFiles):
    def open(self, handle, length):
        raise PeerMemoryError("peer access is not supported")


def test_neighbour_that_cannot_read_the_weights_refuses_and_names_the_remedy(sides, caplog):
    asker, neighbour = sides
    neighbour.averager._memory = Unreadable()
    assert neighbour.averager.refusal(asker.request()) == UNREADABLE
    assert "peer access is not supported" in caplog.text
    assert "exchange.kind=zmq" in caplog.text


def test_memory_of_neighbours_is_closed_if_it_was_not_read_for_long(sides, monkeypatch):
    asker, neighbour = sides
    neighbour.answer(asker.request())
    assert neighbour.averager._opened
    later = time.monotonic() + 1.1 * cuda_exchange._UNUSED_S
    monkeypatch.setattr(cuda_exchange.time, "monotonic", lambda: later)
    neighbour.averager.poll()
    assert not neighbour.averager._opened


class Point(CopyEvent):
    """Work of the training stream that ends after some looks."""

    def __init__(self, looks):
        self.looks = looks

    def wait(self):
        raise AssertionError("training must not wait for the device")

    def done(self):
        self.looks -= 1
        return self.looks < 0


def test_update_waits_for_an_exchange_only_while_the_device_computes(sides, monkeypatch):
    side, _ = sides
    marks = []
    monkeypatch.setattr(side.copies, "mark", lambda: marks.append(Point(5)) or marks[-1])
    side.mover.update_begins()
    assert not marks  # nothing is under way
    side.mailbox.ticks = 1
    side.mover.update_begins()
    assert marks[0].looks == -1
    monkeypatch.setattr(side.copies, "mark", lambda: Point(10**9))
    side.mover.update_begins()  # ends by its limit


# --- the exchange


def make(folder, count=2, kind=EmulatedCudaExchange, **fields):
    cfg, gossip = exchange_config(CONFIG | {"kind": "cuda", "encrypt": False} | fields)
    return [kind(cfg, ExchangeSetup(n, 0, SIZE, None, folder, gossip=gossip)) for n in range(count)]


@pytest.fixture
def ring(tmp_path):
    ring = Ring(make(tmp_path))
    yield ring
    for exchange in ring.exchanges:
        exchange.close()


def test_answers_are_released_after_they_were_read(ring):
    ring.join()
    ring.start()
    ring.loaded()
    wait_until(lambda: ring.work() or all(s.finished > 20 for s in ring.stats()), every_s=0.002)
    ring.rest()
    for exchange in ring.exchanges:
        wait_until(lambda: not any(answer.number for answer in exchange._averager._answers), every_s=0.01)  # noqa: B023


def test_update_is_told_when_no_exchange_is_under_way(ring):
    exchange = ring.exchanges[0]
    ring.start()
    ring.loaded()
    exchange.tick(1)  # no neighbour
    wait_until(lambda: exchange._mailbox.rested == exchange._mailbox.ticks, every_s=0.01)
    ring.join()
    exchange.tick(2)
    wait_until(lambda: exchange.stats().finished, every_s=0.01)
    wait_until(lambda: exchange._mailbox.rested == exchange._mailbox.ticks, every_s=0.01)


def test_error_in_the_exchanges_thread_ends_the_exchange_and_is_logged(ring, monkeypatch, caplog):
    caplog.set_level(logging.ERROR)
    ring.join()
    ring.start()
    ring.loaded()
    exchange, other = ring.exchanges

    def fail(*_):
        raise RuntimeError("the GPU fell off the bus")

    monkeypatch.setattr(exchange._averager, "answer", fail)
    wait_until(lambda: ring.work([1]) or not exchange.alive(), every_s=0.01)
    assert "the GPU fell off the bus" in caplog.text
    assert other.alive()


def test_weights_in_main_memory_are_refused_with_a_remedy(tmp_path):
    cfg, gossip = exchange_config(CONFIG | {"kind": "cuda", "encrypt": False})
    exchange = build_exchange(cfg, ExchangeSetup(0, 0, SIZE, None, tmp_path, gossip=gossip))
    try:
        with pytest.raises(ValueError, match=r"the weights are on cpu: use exchange\.kind=zmq"):
            exchange.start(torch.zeros(SIZE), 0)
    finally:
        exchange.close()


@pytest.mark.parametrize("fields", [{"wire": "bf16"}, {"daemons": 2}])
def test_options_that_have_no_effect_in_gpu_memory_are_refused(fields):
    with pytest.raises(ValueError, match="use wire=fp32 and daemons=1, or kind=zmq"):
        ExchangeConfig(kind="cuda", **fields)


@pytest.mark.parametrize("fields", [{"device": "cpu"}, {"launch": {"kind": "external"}}])
def test_learners_on_other_machines_or_cpus_are_refused_with_a_remedy(fields):
    with pytest.raises(ValueError, match=r"use exchange\.kind=zmq"):
        TrainConfig.model_validate({"strategy": "adpsgd", "nodes": 2, "exchange": {"kind": "cuda"}, **fields})


@pytest.mark.parametrize(
    ("learners", "gpus", "apart", "size", "why"),
    [
        (2, 1, (), 1000, ""),
        (4, 2, (), 1000, ""),
        (4, 3, ((0, 2),), 1000, "GPU 0 cannot access GPU 2"),
        (2, 3, ((0, 2), (2, 1)), 1000, ""),  # which no learner uses
        (2, 3, ((1, 0),), 1000, "GPU 1 cannot access GPU 0"),
        (1, 1, (), 10_000_000, ""),  # 0.56 of 4 GB
        (2, 1, (), 10_000_000, "it may take 0.6 of 2.0 GB of GPU memory"),
        (3, 2, (), 10_000_000, "it may take 0.6 of 2.0 GB of GPU memory"),
        (4, 4, (), 17_000_000, ""),
        (4, 4, (), 18_000_000, "it may take 1.0 of 4.0 GB of GPU memory"),
    ],
)
def test_exchange_chooses_gpu_memory_where_learners_can_share_it(learners, gpus, apart, size, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in apart)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=4e9))
    assert unshared(torch.device("cuda", 0), learners, size) == why
    assert unshared(torch.device("cpu"), learners, size) == "it trains on the CPU"


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({}, "cuda", "auto: cuda, in GPU memory"),
        ({"exchange": {"wire": "bf16"}}, "zmq", "auto: zmq, since exchange.wire"),
        ({"exchange": {"daemons": 2}}, "zmq", "auto: zmq, since exchange.wire or exchange.daemons is set"),
        ({"exchange": {"kind": "zmq"}}, "zmq", ""),
        ({"launch": {"kind": "external"}}, "zmq", "auto: zmq, since learners may be on several machines"),
        ({"exchange": {"kind": "cuda"}}, "cuda", ""),
    ],
)
def test_kind_of_exchange_is_chosen_and_logged(corpus, tmp_path, fields, kind, said, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(run_rank, "unshared", lambda device, learners, size: "")
    job = corpus.job(tmp_path, strategy="adpsgd", nodes=2, device="cuda", **fields)
    assert run_rank._chosen(job, torch.device("cuda", 0), 2, 1000).kind == kind
    assert said in caplog.text
    assert bool(said) == ("exchange.kind auto" in caplog.text)
