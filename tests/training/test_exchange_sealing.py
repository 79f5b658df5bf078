"""Encrypted messages and their sockets: attackers, replays and lost key agreements."""

from contextlib import suppress
from dataclasses import replace

import pytest
import zmq
from support import wait_until

from training.exchange import zmq_sockets
from training.exchange.messages import AGREE, AVERAGE, MISMATCH, OK, Header, unpack
from training.exchange.protocol import ChunkRequest
from training.exchange.sealing import TAG_BYTES, Channel, Session, draw
from training.exchange.zmq_sockets import Address, Links, Router, SealedPeer, SealedRouter
from training.processes.keys import RingKey, call_by_name, secure_client

CHUNK = b"weights " * 8
HEADER = Header(AVERAGE, "fp32", OK, False, 3, 16, 0, 7, 1, 16)


def encrypt(channel, header=b"header", chunk=CHUNK):
    out = bytearray(len(chunk) + TAG_BYTES)
    return channel.seal(header, chunk, out), bytes(out)


def decrypt(channel, head, chunk):
    opened = channel.open(head, chunk, bytearray(max(0, len(chunk) - TAG_BYTES)))
    return None if opened is None else (opened[0], bytes(opened[1]))


def test_message_encrypted_by_one_side_is_decrypted_by_the_other():
    agreed = draw()
    here, there = Session.from_bytes(agreed), Session.from_bytes(agreed)
    for chunk in (CHUNK, b"", b"other weights"):
        head, sealed = encrypt(here.requests, chunk=chunk)
        assert chunk not in sealed or not chunk
        assert b"header" not in head
        assert decrypt(there.requests, head, sealed) == (b"header", chunk)
    assert decrypt(here.answers, *encrypt(there.answers)) == (b"header", CHUNK)
    assert here.name == there.name == agreed[:32]
    assert len({draw()[:32] for _ in range(9)}) == len({draw()[32:64] for _ in range(9)}) == 9


def test_equal_messages_differ_when_encrypted_and_per_direction():
    session = Session.from_bytes(draw())
    first, second, answer = encrypt(session.requests), encrypt(session.requests), encrypt(session.answers)
    assert len({first[0], second[0], answer[0]}) == len({first[1], second[1], answer[1]}) == 3


@pytest.mark.parametrize("what", ["number", "header", "chunk", "cut", "too short", "long", "direction", "key"])
def test_forged_or_altered_message_is_rejected(what):
    agreed = draw()
    here, there = Session.from_bytes(agreed), Session.from_bytes(agreed)
    head, chunk = (bytearray(part) for part in encrypt(here.requests))
    if what in ("number", "header"):
        head[7 if what == "number" else 9] ^= 1
    elif what == "chunk":
        chunk[5] ^= 1
    elif what == "long":
        chunk += b"x"
    elif what in ("cut", "too short"):
        chunk = chunk[: -1 if what == "cut" else 3]
    channel = {"direction": there.answers, "key": Channel(bytes(32))}.get(what, there.requests)
    assert decrypt(channel, head, chunk) is None
    assert decrypt(there.requests, *encrypt(here.requests)) is not None  # the next message is accepted


def test_replayed_or_recombined_messages_are_rejected():
    agreed = draw()
    here, there = Session.from_bytes(agreed), Session.from_bytes(agreed)
    first, second, third = (encrypt(here.requests) for _ in range(3))
    assert decrypt(there.requests, *second) is not None
    for message in (first, second, (third[0], first[1]), (first[0], third[1])):
        assert decrypt(there.requests, *message) is None
    assert decrypt(there.requests, *third) is not None


@pytest.mark.parametrize("length", [0, 95, 97])
def test_keys_of_wrong_length_are_refused(length):
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


def receive(router, timeout_ms=240_000):
    """The next request; "nothing" if none arrives."""
    return router.receive() if router.socket.poll(timeout_ms) else "nothing"


def try_to_send(dealer, message):
    """Send, unless the connection has been refused already: then ZeroMQ may have none, and would wait for ever."""
    with suppress(zmq.Again):
        dealer.send_multipart(message, zmq.NOBLOCK)


def hear_first(outside, router, session, endpoint):
    """Let a session's side come that is heard, so that whoever came before it would have been heard by now."""
    with outside.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        call_by_name(dealer, session.name)
        dealer.connect(endpoint)
        dealer.send_multipart(encrypt(session.requests, HEADER.pack()))
        assert receive(router).header == HEADER


@pytest.mark.parametrize("who", ["a session", "another name", "no name", "the ring's key"])
def test_messages_without_an_agreed_session_are_ignored(routers, key, who):
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
        message = encrypt(session.requests, HEADER.pack())
        try_to_send(dealer, message)
        if who != "a session":
            hear_first(outside, routers[1], session, endpoint)
            assert receive(routers[1], 100) == "nothing"
            return
        request = receive(routers[1])
        assert (request.header, bytes(request.chunk)) == (HEADER, CHUNK)
        for odd in (message, (b"", b""), (message[0],), encrypt(session.requests, b"no header"), (b"x" * 60, b"y")):
            dealer.send_multipart(odd)
            assert receive(routers[1]) is None
        routers[1].reply(request, replace(HEADER, status=MISMATCH), b"")
        assert dealer.poll(240_000)
        head, chunk = dealer.recv_multipart()
        header, rest = decrypt(session.answers, head, chunk)
        assert (unpack(header).status, rest) == (MISMATCH, b"")


def test_repeated_key_agreement_does_not_restart_message_numbers(routers):
    agreed = draw()
    session = Session.from_bytes(agreed)
    with zmq.Context() as outside, outside.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        call_by_name(dealer, session.name)
        message, sent = encrypt(session.requests, HEADER.pack()), []
        for _ in range(2):
            assert routers[1].agree(agreed)
            if not sent:
                dealer.connect(f"tcp://127.0.0.1:{routers[1].port}")
            dealer.send_multipart(message if not sent else encrypt(session.requests, HEADER.pack()))
            routers[1].reply(receive(routers[1]), HEADER, b"")
            assert dealer.poll(240_000)
            sent.append(dealer.recv_multipart())
        dealer.send_multipart(message)
        assert receive(routers[1]) is None
    # equal texts with equal message numbers would have equal bytes
    assert sent[0] != sent[1]


def test_malformed_keys_are_refused_and_old_sessions_evicted(routers, monkeypatch):
    monkeypatch.setattr(zmq_sockets, "_SESSIONS", 2)
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
        try_to_send(dealer, encrypt(oldest.requests, HEADER.pack()))
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
    assert peer.socket.poll(240_000)
    header, answer = peer.receive()
    assert (header, bytes(answer)) == (HEADER, b"mine" + chunk[4:])
    peer.answered()


def test_peer_repeats_a_lost_key_agreement_and_then_sends(routers, peer):
    assert not peer.send(ChunkRequest(HEADER, CHUNK))
    assert receive(routers[0]).header.kind == AGREE  # lost
    peer.silent(0.0)
    agree(routers)
    assert peer.socket.poll(240_000)
    assert peer.receive() is None
    for chunk in (CHUNK, b"smaller", CHUNK, CHUNK):
        exchange(routers, peer, chunk)


def test_peer_whose_session_was_evicted_agrees_again(routers, peer):
    agree(routers)
    assert peer.socket.poll(240_000)
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
    assert peer.socket.poll(240_000)
    peer.receive()
    exchange(routers, peer, CHUNK)


@pytest.mark.parametrize("change", [{"status": MISMATCH}, {"kind": AVERAGE}, "no port"])
def test_nothing_is_sent_to_a_peer_without_key_agreement(routers, peer, change):
    request = receive(routers[0])
    header = request.header if change == "no port" else replace(request.header, **change)
    routers[0].reply(request, header, b"1 1" if change == "no port" else str(routers[1].port).encode())
    assert peer.socket.poll(240_000)
    assert peer.receive() is None
    assert not peer.send(ChunkRequest(HEADER, CHUNK))


def test_malformed_answers_are_ignored(routers, peer):
    agree(routers)
    wait_until(lambda: peer.socket.poll(100), every_s=0.01)
    peer.receive()
    assert peer.send(ChunkRequest(HEADER, CHUNK))
    request = receive(routers[1])
    for noise in ([b"x" * 60, b"y" * 80], [b"", b""], [b"one part"]):
        routers[1].socket.send_multipart([request.sender, *noise])
        assert peer.socket.poll(240_000)
        assert peer.receive() is None
    routers[1].reply(request, request.header, request.chunk)
    assert peer.socket.poll(240_000)
    assert peer.receive()[0] == HEADER


def test_only_messages_of_the_exchange_in_progress_are_kept(routers, peer):
    agree(routers)
    assert peer.socket.poll(240_000)
    peer.receive()
    for token in range(5):
        for index, chunk in enumerate((CHUNK, CHUNK, b"the last one")):
            header = replace(HEADER, token=token, index=index)
            assert peer.send(ChunkRequest(header, chunk))
            peer.pending.add(header, chunk, 0)
        assert sorted(peer._sealed) == [(token, 0), (token, 1), (token, 2)]
        peer.pending.clear()  # the neighbour refuses the exchange, and says so once
