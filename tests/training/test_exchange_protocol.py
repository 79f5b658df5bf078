"""Requests and answers of exchanges, without I/O: all kinds of connections, late answers, crossings, refusals."""

from collections import deque
from dataclasses import replace

import pytest
import torch
from emulated_exchange import CHUNK, SIZE, Learner
from hypothesis import given, settings
from hypothesis import strategies as st

from training.coordinator.membership import Member, View
from training.exchange.messages import AVERAGE, CROSSED, FETCH, MISMATCH, NOT_READY, OK, OUTDATED, Header, MemoryPool
from training.exchange.protocol import Pending, Protocol, Report

CHUNKS = 3


class Node(Learner):
    """A learner with its protocol."""

    def __init__(self, number, wire="fp32", per_step=1, window=2):
        super().__init__(number, wire)
        self.number = number
        self.report = Report(self.outside._mailbox)
        self.protocol = Protocol(number, self.outside._mailbox, self.inside, self.report, per_step, window)

    def tick(self):
        self.outside.tick(self.step)
        self.protocol.new_step()

    def figures(self):
        self.report.publish(1.0, self.inside)
        stats = self.outside.stats()
        return {name: getattr(stats, name) for name in ("initiated", "finished", "answered", "failed", "late")}


class Connection:
    """A connection between two nodes: messages arrive in order, with any delay, and it may break at any time."""

    def __init__(self, asker, answerer):
        self.asker, self.answerer = asker, answerer
        self.pending = Pending()
        self.there, self.back = deque(), deque()

    def send(self):
        """What the asker's window admits."""
        protocol = self.asker.protocol
        while protocol.asking and protocol.asking.pending is self.pending and (request := protocol.next_request()):
            protocol.sent(request)
            self.there.append((request.header, bytearray(request.chunk)))

    def answer_first(self):
        """The first message is answered."""
        if self.there:
            header, chunk = self.there.popleft()
            self.answerer.protocol.poll()
            self.answerer.average(lambda: self.back.append((self.answerer.protocol.answer(header, chunk), chunk)))

    def hear(self):
        """The first answer comes back."""
        if not self.back:
            return None
        header, chunk = self.back.popleft()
        protocol, outcomes = self.asker.protocol, []
        protocol.poll()
        self.asker.average(lambda: outcomes.append(protocol.hear(self.pending, header, chunk, 1.0)))
        self.send()
        if protocol.complete:
            protocol.finish(0.5)
        return outcomes[0]

    def deliver_all(self):
        """Deliver all messages in flight and those that follow from them."""
        while self.there or self.back:
            self.answer_first()
            self.hear()


class Ring:
    """Nodes and all connections between them, the old ones included."""

    def __init__(self, count, **words):
        self.nodes = [Node(number, **words) for number in range(count)]
        self.connections = []

    def begin(self, asker, answerer):
        """An exchange over a separate connection."""
        node = self.nodes[asker]
        connection = Connection(node, self.nodes[answerer])
        self.connections.append(connection)
        node.protocol.number += 1
        node.protocol.begin(answerer, connection.pending, 0.0)
        connection.send()
        return connection

    def close(self):
        for node in self.nodes:
            node.close()


@pytest.fixture
def ring():
    made = []

    def make(count=2, **words):
        made.append(Ring(count, **words))
        for node in made[0].nodes:
            node.tick()
        return made[0]

    yield make
    made[0].close()


KINDS = ["gradient", "take", "give", "poll", "tick", *2 * ["begin", "arrive", "hear"], "give up"]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
    ),
    min_size=80,
    max_size=200,
)
SEEN = {"averaged": 0, "crossed": 0, "late": 0}
"""Counts of rare outcomes in the random histories, which another test checks."""


@settings(max_examples=25)
@given(count=st.integers(2, 4), wire=st.sampled_from(["fp32", "bf16"]), window=st.integers(1, 3), events=EVENTS)
def test_sum_is_conserved_with_late_crossing_and_aborted_exchanges(count, wire, window, events):
    ring = Ring(count, wire=wire, per_step=3, window=window)
    for kind, a, b in events:
        node = ring.nodes[a % count]
        open_ends = [connection for connection in ring.connections if connection.there or connection.back]
        if kind in ("gradient", "take", "give", "tick"):
            getattr(node, kind)()
        elif kind == "poll":
            node.protocol.poll()
            node.check()
        elif kind == "begin" and node.protocol.may_begin:
            ring.begin(a % count, (a + 1 + b % (count - 1)) % count)
        elif kind == "arrive" and open_ends:
            open_ends[b % len(open_ends)].answer_first()
        elif kind == "hear" and open_ends:
            outcome = open_ends[b % len(open_ends)].hear()
            SEEN[outcome] = SEEN.get(outcome, 0) + 1
        elif kind == "give up" and node.protocol.asking:
            node.protocol.give_up()
    for connection in ring.connections:
        connection.deliver_all()
    for node in ring.nodes:
        SEEN["late"] += node.report.late
        node.drain()
    live, exact = sum(node.live.double() for node in ring.nodes), sum(node.exact for node in ring.nodes)
    assert torch.allclose(live, exact, rtol=0, atol=1e-2)
    for node in ring.nodes:
        figures = node.figures()
        under_way = node.protocol.asking is not None
        assert figures["initiated"] == figures["finished"] + figures["failed"] + under_way
        assert under_way == 0  # all exchanges are over when everything has arrived
    ring.close()


def test_random_histories_include_late_and_crossing_messages():
    test_sum_is_conserved_with_late_crossing_and_aborted_exchanges()
    assert SEEN["averaged"] > 100
    assert SEEN["crossed"] > 0
    assert SEEN["late"] > 10


def test_exchange_respects_its_window_and_ends_with_the_mean(ring):
    asker, neighbour = (made := ring(window=2)).nodes
    mean = (asker.exact + neighbour.exact) / 2
    connection = made.begin(0, 1)
    assert [header.index for header, _ in connection.there] == [0, 1]
    assert [header.last for header, _ in connection.there] == [False, False]
    connection.answer_first()
    assert connection.hear() == "averaged"
    assert [(header.index, header.last) for header, _ in connection.there] == [(1, False), (2, True)]
    assert not asker.protocol.may_begin
    connection.deliver_all()
    assert asker.protocol.asking is None
    for node in (asker, neighbour):
        node.drain()
        assert torch.allclose(node.live.double(), mean)
    assert asker.figures() == {"initiated": 1, "finished": 1, "answered": 0, "failed": 0, "late": 0}
    assert neighbour.figures() == {"initiated": 0, "finished": 0, "answered": 1, "failed": 0, "late": 0}
    distance = (asker.trained[0] - neighbour.trained[0]).square().mean().sqrt()
    assert asker.outside.stats().distance == pytest.approx(float(distance))
    assert asker.outside.stats().bytes_sent == neighbour.outside.stats().bytes_received == 4 * SIZE
    assert (asker.outside.stats().last_peer, asker.outside.stats().last_s) == (1, 0.5)


def test_exchanges_per_step_are_limited_and_unused_permits_expire(ring):
    asker = (made := ring(per_step=2)).nodes[0]
    assert asker.protocol.first_of_step
    made.begin(0, 1).deliver_all()
    assert asker.protocol.may_begin
    assert not asker.protocol.first_of_step
    assert not asker.protocol.new_step()
    asker.tick()
    for _ in range(2):
        assert asker.protocol.may_begin
        made.begin(0, 1).deliver_all()
    assert not asker.protocol.may_begin
    asker.tick()
    asker.protocol.pass_over()
    asker.protocol.pass_over()
    assert not asker.protocol.may_begin


def test_exchange_after_an_aborted_one_starts_with_the_next_chunk(ring):
    made = ring(per_step=9, window=1)
    asker = made.nodes[0].protocol
    first = made.begin(0, 1)
    first.answer_first()
    first.hear()
    asker.give_up()
    second = made.begin(0, 1)
    assert [header.index for header, _ in second.there] == [1]
    second.answer_first()
    second.hear()
    second.answer_first()
    second.hear()
    asker.give_up()
    third = made.begin(0, 1)
    assert [header.index for header, _ in third.there] == [0]
    third.deliver_all()
    assert [header.index for header, _ in made.begin(0, 1).there] == [0]
    assert made.nodes[0].figures()["failed"] == 2


def test_late_answers_are_averaged_and_counted(ring):
    made = ring(per_step=2, window=3)
    asker, neighbour = made.nodes
    old = made.begin(0, 1)
    old.answer_first()
    asker.protocol.give_up()
    new = made.begin(0, 1)
    assert old.hear() == "averaged"
    assert asker.protocol.asking.settled == 0  # it is not of the exchange in progress
    old.deliver_all()
    new.deliver_all()
    assert asker.figures() == {"initiated": 2, "finished": 1, "answered": 0, "failed": 1, "late": 3}
    for node in (asker, neighbour):
        node.drain()
    assert torch.allclose(asker.live.double() + neighbour.live.double(), asker.exact + neighbour.exact)


def test_only_the_lower_nodes_request_of_two_crossing_ones_is_answered(ring):
    made = ring(window=1)
    lower, upper = made.nodes
    mean = (lower.exact + upper.exact) / 2
    up, down = made.begin(0, 1), made.begin(1, 0)
    up.answer_first()
    down.answer_first()
    assert (up.back[0][0].status, down.back[0][0].status) == (OK, CROSSED)
    assert (up.hear(), down.hear()) == ("averaged", "crossed")
    assert upper.protocol.asking.settled == 1
    assert upper.protocol.asking.compared == 0
    for node in (lower, upper):
        node.drain()
        assert torch.allclose(node.live[:CHUNK].double(), mean[:CHUNK])  # neither swapped nor averaged twice


def test_requests_for_other_chunks_or_from_other_nodes_do_not_cross(ring):
    made = ring(3, window=1)
    made.begin(0, 1)
    other = made.begin(2, 0)
    other.answer_first()
    assert other.back[0][0].status == OK  # node 0 waits for node 1, not for node 2
    back = made.begin(1, 0)
    header, chunk = back.there.popleft()
    # node 0 waits for chunk 0
    assert made.nodes[0].protocol.answer(replace(header, index=1), chunk).status == OK


def test_refusal_ends_the_exchange_and_later_answers_are_ignored(ring, caplog):
    made = ring(window=2)
    asker = made.nodes[0]
    connection = made.begin(0, 1)
    connection.answer_first()
    header, chunk = connection.back.popleft()
    connection.back.append((replace(header, status=MISMATCH), chunk))
    assert connection.hear() == "refused"
    assert asker.protocol.asking is None
    assert len(connection.pending) == 0
    assert asker.figures()["failed"] == 1
    assert "node 1 refused an exchange: other weights" in caplog.text
    connection.answer_first()
    assert connection.hear() == "ignored"


@pytest.mark.parametrize("change", [{"kind": FETCH}, {"status": NOT_READY}, "short"])
def test_answer_without_weights_is_a_refusal_or_ignored_if_late(ring, change):
    made = ring(window=1, per_step=2)
    asker = made.nodes[0].protocol
    for late in (False, True):
        connection = made.begin(0, 1)
        connection.answer_first()
        header, chunk = connection.back.popleft()
        connection.back.append((header, chunk[:-4]) if change == "short" else (replace(header, **change), chunk))
        if late:
            asker.give_up()
        assert connection.hear() == ("ignored" if late else "refused")
    assert not made.nodes[0].inside.dirty


def test_answers_without_a_request_are_ignored(ring):
    made = ring(window=1)
    connection = made.begin(0, 1)
    connection.answer_first()
    header, chunk = connection.back[0]
    asker = made.nodes[0]
    for odd in (replace(header, token=header.token + 1), replace(header, index=2)):
        assert asker.protocol.hear(connection.pending, odd, chunk, 1.0) == "ignored"
    assert connection.hear() == "averaged"
    assert asker.protocol.hear(connection.pending, header, chunk, 1.0) == "ignored"  # once is enough


def test_new_weights_end_the_exchange_and_its_answers_are_ignored(ring):
    made = ring(window=1)
    asker = made.nodes[0]
    connection = made.begin(0, 1)
    connection.answer_first()
    asker.outside.start(torch.zeros(SIZE), 5)
    asker.protocol.poll()
    assert asker.protocol.asking is None
    assert connection.hear() == "ignored"
    assert not asker.inside.dirty
    assert asker.figures()["failed"] == 1


def test_exchange_after_new_weights_averages_no_more_chunks(ring):
    made = ring(window=1)
    asker = made.nodes[0]
    connection = made.begin(0, 1)
    connection.answer_first()
    asker.outside.start(torch.zeros(SIZE), 5)
    asker.inside.poll()  # as fixed pairs do, where the other side waits for every chunk
    header, chunk = connection.back.popleft()
    assert asker.protocol.hear(connection.pending, header, chunk, 1.0) == "ignored"
    assert asker.protocol.asking.settled == 1
    assert not asker.inside.dirty


def header(node, **words):
    return replace(Header(AVERAGE, "fp32", OK, False, node, CHUNK, 0, 7, 3, SIZE), **words)


@pytest.mark.parametrize(
    ("request_", "length", "status"),
    [
        (header(1), 16, OK),
        (header(1, index=2), 8, OK),
        (header(5, view=2), 16, OUTDATED),
        (header(5, view=3), 16, OK),  # it knows more than this side, or will soon be informed
        (header(1, view=2), 16, OK),
        (header(1, size=SIZE + 1), 16, MISMATCH),
        (header(1, chunk=CHUNK + 1), 16, MISMATCH),
        (header(1, index=3), 16, MISMATCH),
        (header(1, index=2), 16, MISMATCH),
        (header(1, wire="bf16"), 16, MISMATCH),
        (header(1), 12, MISMATCH),
        (header(1, kind=FETCH), 0, OK),
        (header(1, kind=FETCH, size=SIZE + 1), 0, MISMATCH),
    ],
)
def test_requests_are_checked_for_view_size_and_length(ring, request_, length, status):
    node = ring().nodes[0]
    node.protocol.view = View(3, (Member(0, "a"), Member(1, "b")))
    answer = node.protocol.answer(request_, bytearray(length))
    assert (answer.status, answer.kind, answer.node) == (status, request_.kind, 0)
    assert (answer.token, answer.index, answer.view) == (7, request_.index, 3)
    assert node.inside.dirty == (status == OK and request_.kind == AVERAGE)


def test_requests_before_weights_exist_are_answered_not_ready(ring):
    node = ring().nodes[0]
    node.inside.generation = 0
    assert node.protocol.answer(header(1), bytearray(16)).status == NOT_READY
    assert not node.protocol.may_begin


def test_memory_of_answered_messages_is_reused_if_large_enough():
    made = []
    pool = MemoryPool(lambda length: made.append(bytearray(length)) or made[-1])
    first = pool.take(8)
    pool.give_back(first)
    assert pool.take(8) is first
    pool.give_back(first)
    assert len(pool.take(4)) == 4
    assert len(made) == 2
