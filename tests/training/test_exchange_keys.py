"""The ring's key: its file, and which peers pass a handshake."""

import threading
from contextlib import suppress

import pytest
import zmq
from support import wait_until

from training.processes.keys import KeyFileError, RingKey, is_local, secure_client, secure_server


def test_key_is_saved_readable_by_its_owner_only(tmp_path):
    key, path = RingKey.generate(), tmp_path / "deep" / "ring.key"
    key.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RingKey.load(path) == key
    assert [child.name for child in path.parent.iterdir()] == ["ring.key"]


def test_a_key_is_never_replaced(tmp_path):
    path = tmp_path / "ring.key"
    first = RingKey.generate()
    first.save(path)
    with pytest.raises(KeyFileError, match="exists"):
        RingKey.generate().save(path)
    assert RingKey.load(path) == first


def test_the_secret_is_not_shown():
    key = RingKey.generate()
    assert key.secret.decode() not in repr(key) + str(key)


def test_public_and_secret_key_must_match():
    own, foreign = RingKey.generate(), RingKey.generate()
    with pytest.raises(ValueError, match="belong together"):
        RingKey(own.public, foreign.secret)


def test_invalid_or_readable_key_files_are_refused_with_a_remedy(tmp_path):
    path = tmp_path / "ring.key"
    with pytest.raises(KeyFileError, match=r"no key file .*ring\.key.*starling key"):
        RingKey.load(path)
    RingKey.generate().save(path)
    for bit in range(6):  # anything that the group or others may do
        path.chmod(0o600 | 1 << bit)
        with pytest.raises(KeyFileError, match=r"chmod 600 .*ring\.key"):
            RingKey.load(path)
    for mode in (0o700, 0o400, 0o600):
        path.chmod(mode)
        assert RingKey.load(path)
    good = path.read_bytes()
    for bad in (b"", b"hello\n", good[:-20], b"\xff\xfe\x00", good.replace(b"ring key 1", b"ring key 2"), good[:60]):
        path.write_bytes(bad)
        with pytest.raises(KeyFileError, match=r"ring\.key"):
            RingKey.load(path)


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.8.9.1:*", True),
        ("tcp://localhost:5", True),
        ("tcp://[::1]:5", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://0.0.0.0:5", False),
        ("tcp://*:5", False),
        ("tcp://192.168.0.1:5", False),
        ("tcp://host:5", False),
    ],
)
def test_only_local_endpoints_work_without_a_key(endpoint, local):
    assert is_local(endpoint) is local
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        if local:
            secure_client(socket, None, endpoint)
            secure_server(context, socket, None, endpoint)
        else:
            with pytest.raises(ValueError, match="key file"):
                secure_client(socket, None, endpoint)
            with pytest.raises(ValueError, match="loopback"):
                secure_server(context, socket, None, endpoint)


@pytest.mark.parametrize("who", ["same", "other", "none", "knows the public half only"])
def test_only_clients_with_the_key_pass_the_handshake(who):
    key, other = RingKey.generate(), RingKey.generate()
    with zmq.Context() as context, zmq.Context() as outside:
        server, client = context.socket(zmq.ROUTER), outside.socket(zmq.DEALER)
        server.linger = client.linger = 0
        secure_server(context, server, key, "tcp://127.0.0.1:1")
        endpoint = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
        secure_client(client, {"same": key, "none": None}.get(who, other), endpoint)
        if who == "knows the public half only":
            client.setsockopt(zmq.CURVE_SERVERKEY, key.public)
        client.connect(endpoint)
        with suppress(zmq.Again):  # once refused, there is no connection to send by
            client.send(b"hello", zmq.NOBLOCK)
        if who != "same":  # a holder who comes later is heard first
            with outside.socket(zmq.DEALER) as holder:
                holder.linger = 0
                secure_client(holder, key, endpoint)
                holder.connect(endpoint)
                holder.send(b"holder")
                assert server.poll(240_000)
                assert server.recv_multipart()[-1] == b"holder"
        assert bool(server.poll(240_000 if who == "same" else 100)) is (who == "same")
        server.close()
        client.close()


def test_authenticator_ends_with_its_context_and_accepts_one_key():
    before = threading.active_count()
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as socket:
        secure_server(context, socket, RingKey.generate(), "tcp://127.0.0.1:1")
        with pytest.raises(ValueError, match="another ring"):
            secure_server(context, socket, RingKey.generate(), "tcp://127.0.0.1:1")
    context.term()
    wait_until(lambda: threading.active_count() <= before)
