"""Encrypted messages and their sockets: attackers, replays and lost key agreements."""

from contextlib import suppress
from dataclasses import replace

import pytest
import zmq
from support import wait_until

from training.exchange import zmq_router
from training.exchange.messages import AGREE, AVERAGE, MISMATCH, OK, Header, unpack
from training.exchange.protocol import ChunkRequest
from training.exchange.sealing import TAG_BYTES, Channel, Session, draw
from training.exchange.zmq_peer import Address, Links, SealedPeer
from training.exchange.zmq_router import Router, SealedRouter
from training.processes.keys import RingKey, call_by_name, secure_client

CHUNK = b"weights " * 8
HEADER = Header(AVERAGE, "fp32", OK, False, 3, 16, 0, 7, 1, 16)


def seal(channel, header=b"header", chunk=CHUNK):
    out = bytearray(len(chunk) + TAG_BYTES)
    return channel.seal(header, chunk, out), bytes(out)


def opened(channel, head, chunk):
    found = channel.open(head, chunk, bytearray(max(0, len(chunk) - TAG_BYTES)))
    return None if found is None else (found[0], bytes(found[1]))


def test_what_one_side_seals_the_other_opens():
    agreed = draw()
    here, there = Session.from_bytes(agreed), Session.from_bytes(agreed)
    for chunk in (CHUNK, b"", b"other weights"):
        head, sealed = seal(here.requests, chunk=chunk)
        assert chunk not in sealed or not chunk
        assert b"header" not in head
        assert opened(there.requests, head, sealed) == (b"header", chunk)
    assert opened(here.answers, *seal(there.answers)) == (b"header", CHUNK)
    assert here.name == there.name == agreed[:32]
    assert len({draw()[:32] for _ in range(9)}) == len({draw()[32:64] for _ in range(9)}) == 9


def test_two_messages_are_never_alike_nor_are_the_two_directions():
    session = Session.from_bytes(draw())
    first, second, answer = seal(session.requests), seal(session.requests), seal(session.answers)
    assert len({first[0], second[0], answer[0]}) == len({first[1], second[1], answer[1]}) == 3


@pytest.mark.parametrize("what", ["number", "header", "chunk", "cut", "too short", "long", "direction", "key"])
def test_a_message_that_others_made_or_altered_is_not_opened(what):
    agreed = draw()
    here, there = Session.from_bytes(agreed), Session.from_bytes(agreed)
    head, chunk = (bytearray(part) for part in seal(here.requests))
    if what in ("number", "header"):
        head[7 if what == "number" else 9] ^= 1
    elif what == "chunk":
        chunk[5] ^= 1
    elif what == "long":
        chunk += b"x"
    elif what in ("cut", "too short"):
        chunk = chunk[: -1 if what == "cut" else 3]
    channel = {"direction": there.answers, "key": Channel(bytes(32))}.get(what, there.requests)
    assert opened(channel, head, chunk) is None
    assert opened(there.requests, *seal(here.requests)) is not None  # the next one is


def test_a_message_that_was_overheard_cannot_be_said_again_nor_put_together_from_two():
    agreed = draw()
    here, there = Session.from_bytes(agreed), Session.from_bytes(agreed)
    first, second, third = (seal(here.requests) for _ in range(3))
    assert opened(there.requests, *second) is not None
    for message in (first, second, (third[0], first[1]), (first[0], third[1])):
        assert opened(there.requests, *message) is None
    assert opened(there.requests, *third) is not None


@pytest.mark.parametrize("length", [0, 95, 97])
def test_keys_of_another_length_are_none(length):
    with pytest.raises(ValueError, match=f"{length} bytes"):
        Session.from_bytes(bytes(length))


@pytest.fixture
def key():
    return RingKey.generate()


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.fixture
def routers(context, key):
    both = Router(context, key, 4096, "127.0.0.1", 0), SealedRouter(context, 4096, "127.0.0.1", 0)
    yield both
    for router in both:
        router.close()


def receive(router, timeout_ms=10_000):
    """The next request, or "nothing"."""
    return router.receive() if router.socket.poll(timeout_ms) else "nothing"


def say(dealer, message):
    """Send, unless the connection has been refused already: then ZeroMQ may have none, and would wait for ever."""
    with suppress(zmq.Again):
        dealer.send_multipart(message, zmq.NOBLOCK)


def hear_first(outside, router, session, endpoint):
    """Let a session's side come that is heard, so that whoever came before it would have been heard by now."""
    with outside.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        call_by_name(dealer, session.name)
        dealer.connect(endpoint)
        dealer.send_multipart(seal(session.requests, HEADER.pack()))
        assert receive(router).header == HEADER


@pytest.mark.parametrize("who", ["a session", "another name", "no name", "the ring's key"])
def test_only_who_has_agreed_on_keys_is_let_in(routers, key, who):
    agreed = draw()
    session = Session.from_bytes(agreed)
    assert routers[1].agree(agreed)
    endpoint = f"tcp://127.0.0.1:{routers[1].port}"
    with zmq.Context() as outside, outside.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if who == "the ring's key":
            secure_client(dealer, key, endpoint)
        elif who != "no name":
            call_by_name(dealer, session.name if who == "a session" else b"0" * 32)
        dealer.connect(endpoint)
        message = seal(session.requests, HEADER.pack())
        say(dealer, message)
        if who != "a session":
            hear_first(outside, routers[1], session, endpoint)
            assert receive(routers[1], 100) == "nothing"
            return
        request = receive(routers[1])
        assert (request.header, bytes(request.chunk)) == (HEADER, CHUNK)
        for odd in (message, (b"", b""), (message[0],), seal(session.requests, b"no header"), (b"x" * 60, b"y")):
            dealer.send_multipart(odd)
            assert receive(routers[1]) is None
        routers[1].reply(request, replace(HEADER, status=MISMATCH), b"")
        assert dealer.poll(10_000)
        head, chunk = dealer.recv_multipart()
        header, rest = opened(session.answers, head, chunk)
        assert (unpack(header).status, rest) == (MISMATCH, b"")


def test_keys_that_are_agreed_on_twice_do_not_count_from_the_beginning_again(routers):
    agreed = draw()
    session = Session.from_bytes(agreed)
    with zmq.Context() as outside, outside.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        call_by_name(dealer, session.name)
        message, sent = seal(session.requests, HEADER.pack()), []
        for _ in range(2):
            assert routers[1].agree(agreed)
            if not sent:
                dealer.connect(f"tcp://127.0.0.1:{routers[1].port}")
            dealer.send_multipart(message if not sent else seal(session.requests, HEADER.pack()))
            routers[1].reply(receive(routers[1]), HEADER, b"")
            assert dealer.poll(10_000)
            sent.append(dealer.recv_multipart())
        dealer.send_multipart(message)
        assert receive(routers[1]) is None
    # the same text under the same number would be the same bytes
    assert sent[0] != sent[1]


def test_keys_that_are_none_let_nobody_in_and_the_oldest_session_goes_when_there_are_many(routers, monkeypatch):
    monkeypatch.setattr(zmq_router, "_SESSIONS", 2)
    router = routers[1]
    assert not router.agree(b"too short")
    drawn = [draw() for _ in range(3)]
    assert all(router.agree(agreed) for agreed in drawn)
    endpoint = f"tcp://127.0.0.1:{router.port}"
    oldest, *others = map(Session.from_bytes, drawn)
    with zmq.Context() as outside, outside.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        call_by_name(dealer, oldest.name)
        dealer.connect(endpoint)
        say(dealer, seal(oldest.requests, HEADER.pack()))
        for session in others:
            hear_first(outside, router, session, endpoint)
        assert receive(router, 100) == "nothing"


@pytest.fixture
def peer(context, routers, key):
    poller = zmq.Poller()
    address = Address(1, "x", f"tcp://127.0.0.1:{routers[0].port}")
    made = SealedPeer(address, Links(context, key, 0.1, 4096), poller)
    yield made
    made.close()


def agree(routers):
    """Answer the next agreement as a daemon does."""
    request = receive(routers[0])
    assert request.header.kind == AGREE
    assert routers[1].agree(request.chunk)
    routers[0].reply(request, request.header, str(routers[1].port).encode())


def exchange(routers, peer, chunk):
    assert peer.send(ChunkRequest(HEADER, chunk))
    request = receive(routers[1])
    assert bytes(request.chunk) == chunk
    request.chunk[:4] = b"mine"
    routers[1].reply(request, request.header, request.chunk)
    assert peer.socket.poll(10_000)
    header, answer = peer.receive()
    assert (header, bytes(answer)) == (HEADER, b"mine" + chunk[4:])
    peer.answered()


def test_a_peer_sends_when_it_has_agreed_and_asks_again_if_that_was_lost(routers, peer):
    assert not peer.send(ChunkRequest(HEADER, CHUNK))
    assert receive(routers[0]).header.kind == AGREE  # lost
    peer.silent(0.0)
    agree(routers)
    assert peer.socket.poll(10_000)
    assert peer.receive() is None
    for chunk in (CHUNK, b"smaller", CHUNK, CHUNK):
        exchange(routers, peer, chunk)


def test_a_peer_that_was_forgotten_and_refused_agrees_again(routers, peer):
    agree(routers)
    assert peer.socket.poll(10_000)
    peer.receive()
    exchange(routers, peer, CHUNK)
    peer.pending.add(HEADER, CHUNK, 0)
    peer.silent(0.0)
    assert receive(routers[0], 100) == "nothing"  # what it was asked may still be answered over this connection
    peer.pending.pop(HEADER)
    peer.socket.disconnect(peer.socket.getsockopt(zmq.LAST_ENDPOINT))  # ZeroMQ may do so when it is refused
    wait_until(lambda: not peer.send(ChunkRequest(HEADER, CHUNK)), every_s=0.01)
    peer.silent(0.0)
    agree(routers)
    assert peer.socket.poll(10_000)
    peer.receive()
    exchange(routers, peer, CHUNK)


@pytest.mark.parametrize("change", [{"status": MISMATCH}, {"kind": AVERAGE}, "no port"])
def test_a_peer_that_does_not_agree_gets_nothing(routers, peer, change):
    request = receive(routers[0])
    header = request.header if change == "no port" else replace(request.header, **change)
    routers[0].reply(request, header, b"1 1" if change == "no port" else str(routers[1].port).encode())
    assert peer.socket.poll(10_000)
    assert peer.receive() is None
    assert not peer.send(ChunkRequest(HEADER, CHUNK))


def test_answers_that_are_noise_are_no_answers(routers, peer):
    agree(routers)
    wait_until(lambda: peer.socket.poll(100), every_s=0.01)
    peer.receive()
    assert peer.send(ChunkRequest(HEADER, CHUNK))
    request = receive(routers[1])
    for noise in ([b"x" * 60, b"y" * 80], [b"", b""], [b"one part"]):
        routers[1].socket.send_multipart([request.sender, *noise])
        assert peer.socket.poll(10_000)
        assert peer.receive() is None
    routers[1].reply(request, request.header, request.chunk)
    assert peer.socket.poll(10_000)
    assert peer.receive()[0] == HEADER


def test_only_messages_of_the_exchange_in_progress_are_kept(routers, peer):
    agree(routers)
    assert peer.socket.poll(10_000)
    peer.receive()
    for token in range(5):
        for index, chunk in enumerate((CHUNK, CHUNK, b"the last one")):
            header = replace(HEADER, token=token, index=index)
            assert peer.send(ChunkRequest(header, chunk))
            peer.pending.add(header, chunk, 0)
        assert sorted(peer._sealed) == [(token, 0), (token, 1), (token, 2)]
        peer.pending.clear()  # the neighbour refuses the exchange, and says so once
