"""Newcomers take weights and optimizer state of one step; neighbours that cannot give them are skipped."""

import logging
import textwrap
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zmq
from emulated_device import EmulatedCudaExchange
from ranks import run_ranks
from support import wait_until
from torch import nn

from training.config import AdamWConfig, SgdConfig, TrainConfig
from training.coordinator.membership import Member, View
from training.exchange import ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.exchange.mailbox import make_memory
from training.exchange.messages import MISMATCH, NOT_READY, OK, REPLICA, WAITING, Header, unpack
from training.exchange.replicas import ReplicaGiver, ReplicaMemory, replica_bytes, replica_length
from training.learner.flat import FlatParameters
from training.learner.moments import Moments
from training.learner.optim import build_optimizer
from training.node.node_exchange import NodeExchange
from training.node.process_group import NodeGroup
from training.processes.keys import RingKey

ADAMW, SGD = AdamWConfig(lr=0.01), SgdConfig(lr=0.01)


class Node:
    """A learner with a real exchange; its steps follow from their number alone."""

    def __init__(self, number, folder, cfg=ADAMW, key=None, moments=None, kind="zmq", timeout_s=60.0):
        torch.manual_seed(number)
        self.model = nn.Sequential(nn.Linear(60, 90), nn.BatchNorm1d(90), nn.Linear(90, 80))
        self.flat = FlatParameters(self.model)
        self.optimizer = build_optimizer(cfg, self.model)
        self.moments = Moments(self.optimizer, self.flat)
        size = self.flat.weights.numel()
        fields = {"kind": kind, "chunk_kb": 16, "timeout_s": timeout_s, "encrypt": key is not None}
        exchange = ExchangeConfig.model_validate(fields)
        count = len(self.moments.names) if moments is None else moments
        setup = ExchangeSetup(number, 0, size, key, folder, moments=count, optimizer=self.moments.optimizer)
        self.exchange = (EmulatedCudaExchange if kind == "cuda" else build_exchange)(exchange, setup)
        self.ring = NodeExchange(
            number, NodeGroup(0, 1, folder, torch.device("cpu")), self.flat, self.exchange, self.moments
        )
        self.steps, self.past = 0, []

    def step(self):
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        self.flat.grads.copy_(torch.randn(self.flat.grads.shape, generator=generator))
        self.optimizer.step()
        self.past.append(self.state())
        self.ring.after_step(self.steps)

    def state(self):
        """Weights, moments and steps as one vector."""
        rows = torch.zeros(len(self.moments.names), self.flat.weights.numel())
        steps = self.moments.write(rows, 0, rows.shape[1])
        return torch.cat([self.flat.weights, rows.flatten(), torch.tensor([steps])])


class Nodes:
    """Learners of which some train in threads."""

    def __init__(self, folder):
        self.folder, self.made, self.ended, self.threads = folder, [], threading.Event(), []

    def make(self, number, *args, **options):
        self.made.append(Node(number, self.folder, *args, **options))
        return self.made[-1]

    def train(self, node, work=Node.step):
        """Start, and go on until the test ends."""
        node.ring.start(0)

        def run():
            while not self.ended.is_set():
                work(node)
                time.sleep(0.005)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        return node

    def close(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()
        for node in self.made:
            node.exchange.close()


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    made.close()


def view_of(*endpoints):
    """Nodes 0, 1, ... at these endpoints."""
    return View(1, tuple(Member(n, f"once-{n}", (endpoint,)) for n, endpoint in enumerate(endpoints)))


@pytest.mark.parametrize(
    ("cfg", "key", "kind"),
    [(ADAMW, RingKey.generate(), "zmq"), (SGD, None, "zmq"), (ADAMW, None, "cuda")],
    ids=["adamw secure", "sgd plain", "adamw in GPU memory"],
)
def test_newcomer_continues_exactly_from_its_neighbours_step(nodes, cfg, key, kind):
    neighbour, newcomer = nodes.train(nodes.make(0, cfg, key, kind=kind)), nodes.make(1, cfg, key, kind=kind)
    newcomer.ring.set_view(view_of(neighbour.exchange.endpoint, newcomer.exchange.endpoint))
    assert newcomer.ring.take_from_neighbour()
    nodes.ended.set()
    nodes.threads[0].join()
    neighbour.step()
    steps = [n for n, then in enumerate(neighbour.past, 1) if torch.equal(then, newcomer.state())]
    assert len(steps) == 1, "weights and optimizer state are those of one step"
    newcomer.steps = steps[0]
    newcomer.ring.start(newcomer.steps)
    newcomer.step()
    assert torch.equal(newcomer.state(), neighbour.past[steps[0]])


def test_neighbour_without_matching_optimizer_state_gives_only_weights(nodes, caplog):
    fresh = nodes.train(nodes.make(0), lambda node: node.ring.idle(0))
    other, without = nodes.train(nodes.make(1, SGD)), nodes.train(nodes.make(2, moments=0))
    newcomer = nodes.make(3)
    for neighbour, why in ((fresh, "not ready"), (other, "other weights"), (without, "other weights")):
        newcomer.ring.set_view(view_of(neighbour.exchange.endpoint))
        caplog.clear()
        with caplog.at_level(logging.INFO, "training.exchange.client"):
            assert newcomer.ring.take_from_neighbour()
        [told] = [record for record in caplog.records if record.name == "training.exchange.client"]
        assert why in told.message
        # learners that start together have no state to send, and nothing is wrong
        assert told.levelno == (logging.INFO if neighbour is fresh else logging.WARNING)
        assert newcomer.state()[-1] == 0, "an optimizer without a past"
        # `fresh` makes no steps
        assert neighbour is not fresh or torch.equal(newcomer.flat.weights, fresh.flat.weights)
    assert newcomer.exchange.fetch_replica(1.0) is None
    assert without.exchange.fetch_replica(1.0) is None
    newcomer.ring.set_view(View())
    assert not newcomer.ring.take_from_neighbour()


@contextmanager
def emulated_neighbour(answer):
    """An emulated neighbour; `answer` maps a request's header to status and values, or to None for no answer."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        port, ended = socket.bind_to_random_port("tcp://127.0.0.1"), threading.Event()

        def run():
            while not ended.is_set():
                if socket.poll(20):
                    who, head, _ = socket.recv_multipart()
                    header = unpack(head)
                    if (said := answer(header)) is not None:
                        status, values = said
                        fields = (header.chunk, header.index, header.token, 1, header.size)
                        head = Header(header.kind, "fp32", status, False, 0, *fields).pack()
                        socket.send_multipart([who, head, values.astype(np.float32).tobytes()])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            ended.set()
            thread.join()


def ones(header):
    return np.ones(min(header.chunk, header.size - header.index * header.chunk))


def dies_in_the_middle(header):
    return (OK, ones(header)) if header.index < 2 else None


def has_infinities(header):
    return OK, ones(header) * (np.inf if header.index == 2 else 1)


def never_writes(header):
    return WAITING, np.zeros(0)


@pytest.mark.parametrize("answer", [dies_in_the_middle, has_infinities, never_writes])
@pytest.mark.variants(1)
def test_next_neighbour_is_asked_after_a_failed_fetch(nodes, answer):
    neighbour, newcomer = nodes.train(nodes.make(1)), nodes.make(0, timeout_s=0.5)
    with emulated_neighbour(answer) as endpoint:
        members = (Member(2, "x", (neighbour.exchange.endpoint,)), Member(1, "x", (endpoint,)))
        newcomer.ring.set_view(View(1, members))
        replica = wait_until(lambda: newcomer.exchange.fetch_replica(3.0))  # again if `neighbour` has been stopped
        assert replica.rows.shape == (3, newcomer.flat.weights.numel())
        assert replica.rows.isfinite().all()
        assert not (replica.rows == 1).all(1).any()
        newcomer.ring.set_view(View(2, members[1:]))
        assert newcomer.exchange.fetch_replica(0.6) is None


# --- what the daemon decides, without any I/O

LENGTH = replica_length(10, 1)


def ask(giver, index=0, reader=b"a", now=0.0, optimizer=b"sgd", size=LENGTH):
    return giver.answer(Header(REPLICA, "fp32", OK, False, 5, 8, index, 1, 1, size), reader, optimizer, now)


def write(giver, value):
    """What the training process does after a step."""
    assert giver.memory.wanted
    giver.memory.given[:] = value
    giver.memory.give()


@pytest.fixture
def giver():
    made = ReplicaGiver(ReplicaMemory(make_memory(replica_bytes(LENGTH)), LENGTH), "sgd", 8, timeout_s=5.0)
    yield made
    made.memory.close()


def status(answer):
    return answer[0]


def test_replica_is_written_on_request_even_if_steps_are_long(giver):
    assert not giver.memory.wanted
    assert status(ask(giver)) == WAITING
    assert status(ask(giver, now=50.0)) == WAITING
    write(giver, 3.0)
    giver.tidy(50.05)
    chunks = [ask(giver, index, now=50.1) for index in range(3)]
    assert np.frombuffer(b"".join(values for _, values in chunks), np.float32).tolist() == [3.0] * LENGTH
    assert status(ask(giver, 3, now=50.1)) == MISMATCH
    assert not giver.memory.wanted


def test_a_replica_is_not_replaced_while_it_is_read(giver):
    ask(giver)
    write(giver, 3.0)
    assert status(ask(giver, now=1.0)) == OK
    assert status(ask(giver, reader=b"b", now=5.0)) == OK  # an old one, but it is still read
    assert status(ask(giver, reader=b"c", now=20.0)) == WAITING  # not read for a long time
    assert status(ask(giver, 1, now=20.0)) == NOT_READY  # now it is too late for those
    write(giver, 4.0)
    assert status(ask(giver, 1, now=20.1)) == NOT_READY
    assert status(ask(giver, 1, reader=b"c", now=20.1)) == OK


def test_mismatched_requests_and_optimizers_without_steps_are_refused(giver):
    for change in ({"optimizer": b"adamw"}, {"size": LENGTH + 1}):
        assert status(ask(giver, **change)) == MISMATCH
        assert not giver.memory.wanted
    ask(giver)
    write(giver, 0.0)
    assert status(ask(giver, now=0.1)) == NOT_READY


def test_memory_is_released_when_no_newcomer_reads(giver):
    ask(giver)
    write(giver, 3.0)
    ask(giver, now=20.0)
    giver.tidy(40.0)
    assert giver.memory.given[0] == 3.0
    giver.tidy(60.0)
    assert giver.memory.given[0] == 0.0
    assert status(ask(giver, 1, now=60.0)) == NOT_READY
    assert status(ask(giver, now=60.0)) == WAITING


def test_optimizer_state_is_refused_for_exchanges_that_cannot_give_it():
    with pytest.raises(ValueError, match=r"strategy\.newcomer=weights"):
        TrainConfig(exchange={"daemons": 2}, strategy={"kind": "adpsgd", "newcomer": "weights+optimizer"})
    TrainConfig.model_validate({"exchange": {"daemons": 2}})


# --- nodes of several

PROGRAM = textwrap.dedent(
    """
    import os, sys, threading
    from pathlib import Path
    import torch
    from torch import nn
    from ranks import device_of
    from training.config import AdamWConfig
    from training.exchange import ExchangeSetup, build_exchange
    from training.exchange.config import ExchangeConfig
    from training.learner.flat import FlatParameters
    from training.node.process_group import NodeGroup
    from training.coordinator.membership import Member, View
    from training.learner.moments import Moments
    from training.learner.optim import build_optimizer
    from training.node.node_exchange import NodeExchange

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    group = NodeGroup(rank, size, folder / "meet", device_of(rank))
    exchange_cfg, cfg = ExchangeConfig(encrypt=False, chunk_kb=16), AdamWConfig()

    def learner(node):
        torch.manual_seed(node)
        model = nn.Sequential(nn.Linear(90, 91), nn.Linear(91, 33))
        flat, optimizer = FlatParameters(model), build_optimizer(cfg, model)
        moments, (start, stop) = Moments(optimizer, flat), group.share(flat.weights.numel())
        setup = ExchangeSetup(node, rank, stop - start, None, folder, moments=2, optimizer=moments.optimizer)
        return flat, optimizer, moments, build_exchange(exchange_cfg, setup)

    flat, optimizer, moments, exchange = learner(0)
    for step in range(3 + rank):  # its ranks are asked at different steps
        flat.grads.fill_(0.5 + step)
        optimizer.step()
    start, stop = group.share(flat.weights.numel())
    exchange.start(flat.weights[start:stop], 1)
    ended = threading.Event()

    def give():
        while not ended.wait(0.01):
            slot = exchange.replica_slot()
            if slot is not None:
                slot[0].copy_(flat.weights[start:stop])
                exchange.give_replica(moments.write(slot[1:], start, stop))

    thread = threading.Thread(target=give)
    thread.start()
    new_flat, new_optimizer, new_moments, new_exchange = learner(1)
    ring = NodeExchange(1, group, new_flat, new_exchange, new_moments)
    ring.set_view(View(1, (Member(0, "x", tuple(group.gather_text(exchange.endpoint))),)))
    assert ring.take_from_neighbour()
    ended.set()
    thread.join()
    mine, whole = torch.zeros(2, stop - start), torch.zeros(2, new_flat.weights.numel())
    moments.write(mine, start, stop)
    assert new_moments.write(whole, 0, whole.shape[1]) == 2 + size
    assert torch.equal(mine, whole[:, start:stop]) and mine.abs().sum() > 0
    assert torch.equal(flat.weights[start:stop], new_flat.weights[start:stop])
    everything = torch.cat([new_flat.weights, whole.flatten()]).double()
    sums = group.gather_numbers([float(everything.sum()), float(everything.square().sum())])
    assert all(one == sums[0] for one in sums), "ranks of a node do not differ"
    exchange.close()
    new_exchange.close()
    group.close()
    print("fine", flush=True)
    os._exit(0)
    """
)


@pytest.mark.slow
def test_each_rank_of_a_node_takes_its_share(tmp_path):
    run_ranks(PROGRAM, 2, tmp_path)
