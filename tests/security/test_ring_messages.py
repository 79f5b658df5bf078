"""What an attacker can send to a training's ports: oversized, repeated or malformed messages; only the log shows it."""

import socket
import threading
import time

import pytest
import zmq
from support import load_beside, wait_until

from training.coordinator.messages import CoordinatorError
from training.processes.keys import KeyFileError, RingKey, secure_client, secure_server

emulated_nodes = load_beside(__file__, "../training/emulated_nodes.py")
make_coordinator_process = emulated_nodes.make_coordinator_process


class Recorder:
    """A relay to a port that records what the client sends."""

    def __init__(self, port):
        self.heard, self.port = b"", port
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        client, _ = self.listener.accept()
        server = socket.create_connection(("127.0.0.1", self.port))
        threading.Thread(target=self._back, args=(server, client), daemon=True).start()
        while data := client.recv(65536):
            self.heard += data
            server.sendall(data)

    def _back(self, server, client):
        try:
            while data := server.recv(65536):
                client.sendall(data)
        except OSError:
            pass


def test_recorded_messages_cannot_be_replayed_or_read():
    """CURVE's keys are random for each connection: recorded bytes are useless on the next one."""
    key = RingKey.generate()
    with zmq.Context() as context, zmq.Context() as outside:
        server, client = context.socket(zmq.ROUTER), outside.socket(zmq.DEALER)
        server.linger = client.linger = 0
        secure_server(context, server, key, "tcp://127.0.0.1:1")
        port = server.bind_to_random_port("tcp://127.0.0.1")
        relay = Recorder(port)
        endpoint = f"tcp://127.0.0.1:{relay.listener.getsockname()[1]}"
        secure_client(client, key, endpoint)
        client.connect(endpoint)
        client.send(b"give me your weights")
        assert server.poll(240_000)
        assert server.recv_multipart()[-1] == b"give me your weights"
        wait_until(lambda: len(relay.heard) > 300, every_s=0.01)
        assert b"weights" not in relay.heard  # nor can it be read
        assert key.secret not in relay.heard
        with socket.create_connection(("127.0.0.1", port)) as again:
            again.sendall(relay.heard)
            assert not server.poll(700)
        server.close()
        client.close()


def test_coordinator_ignores_noise_and_oversized_frames_at_its_port(make_coordinator_process):
    coordinator = make_coordinator_process(key=True).start("--fresh")
    host, _, port = coordinator.address.rpartition(":")
    greeting = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01CURVE".ljust(54, b"\0")
    noise = [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, greeting + b"\x06" + (2**62).to_bytes(8, "big"), b"\xff" * 100]
    for data in noise:
        with socket.create_connection((host, int(port)), timeout=240) as stranger:
            stranger.sendall(data)
            time.sleep(0.05)
    assert coordinator.ask(op="status")["members"] == []
    assert coordinator.process.poll() is None


@pytest.mark.parametrize("keyed", [True, False])
def test_oversized_message_ends_only_its_own_connection(keyed):
    key = RingKey.generate() if keyed else None
    with zmq.Context() as context, zmq.Context() as outside:
        server = context.socket(zmq.ROUTER)
        server.linger = 0
        server.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
        secure_server(context, server, key, "tcp://127.0.0.1:1")
        endpoint = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
        clients = [outside.socket(zmq.DEALER) for _ in range(2)]
        for client in clients:
            client.linger = 0
            secure_client(client, key, endpoint)
            client.connect(endpoint)
        clients[0].send(b"x" * (1 << 20))
        clients[1].send(b"small")
        assert server.poll(240_000)
        assert server.recv_multipart()[-1] == b"small"
        assert not server.poll(300)
        for end in (server, *clients):
            end.close()


def test_every_listening_socket_limits_the_message_size():
    """Without one, ZeroMQ takes as much memory as a message claims."""
    from pathlib import Path

    import training

    for path in Path(training.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if "zmq.ROUTER" in text or "zmq.DEALER" in text:
            assert "MAXMSGSIZE" in text, path


def test_coordinator_answers_malformed_messages_and_keeps_running(make_coordinator_process):
    coordinator = make_coordinator_process().start("--fresh")
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{coordinator.address}")
        for data in (
            b"[" * 100_000,
            b'{"op":' * 50_000,
            b"\xff\xfe",
            b"9" * 5000,
            b'{"op": {"op": "status"}}',
            b"null",
        ):
            stranger.send_multipart([b"1", data])
            assert stranger.poll(240_000)
            assert b"error" in stranger.recv_multipart()[1]
        for parts in ([b""], [b"1", b"2", b"3", b"4"], [b"x" * 100_000]):
            stranger.send_multipart(parts)
    for message in ({"op": "journal", "offset": "../../etc/passwd"}, {"op": "journal"}, {"op": "__class__"}):
        with pytest.raises(CoordinatorError):
            coordinator.send(**message)
    assert coordinator.ask(op="status")["finish"] == ""


def test_key_file_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "ring.key"
    RingKey.generate().save(path)
    for mode in (0o640, 0o604, 0o644, 0o660):
        path.chmod(mode)
        with pytest.raises(KeyFileError, match="chmod 600"):
            RingKey.load(path)
    path.chmod(0o600)
    assert RingKey.load(path).public
