"""Connections of clients that read no answers stayed open for ever, and pings filled the server's memory.

asyncio closes a connection when its client has read everything. Requests one after another whose answers are not read
therefore kept it, without a token, though the server had given them up: as many connections as the server may have
locked everybody out. The answers to pings of a stream were kept without bound.
"""

import socket
import threading
from contextlib import closing, suppress

import pytest
from support import load_beside, wait_until
from websockets.frames import Frame, Opcode

server_of_tones = load_beside(__file__, "../recognition/running_server.py")


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    return server_of_tones.tone_transcriber(tmp_path_factory.mktemp("tones"))


def opened(server):
    """A connection that takes little before it is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(240)
    connection.connect(("127.0.0.1", server.port))
    return connection


def test_a_connection_whose_answers_are_not_read_is_closed(transcriber):
    with server_of_tones.running(transcriber, idle_s=0.5) as server, closing(opened(server)) as connection:
        with suppress(ConnectionError):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        wait_until(lambda: not server.server.server_state.connections, patience_s=60)


def test_pings_are_not_read_while_their_answers_are_not(transcriber):
    with server_of_tones.running(transcriber) as server, closing(opened(server)) as connection:
        connection.sendall(
            b"GET /stream?sample_rate=16000 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert connection.recv(1).startswith(b"H")
        (stream,) = server.server.server_state.connections
        kept = stream.transport.get_extra_info("socket")
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the system keeps megabytes otherwise
        pings = Frame(Opcode.PING, b"p" * 125).serialize(mask=True) * 100
        audio = Frame(Opcode.BINARY, bytes(2)).serialize(mask=True)
        stop = threading.Event()

        def send():
            with suppress(OSError):
                while not stop.is_set():
                    connection.sendall(audio + pings)

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        wait_until(lambda: not stream.transport.is_reading() and not stream.read_paused, patience_s=60)
        stop.set()
        connection.shutdown(socket.SHUT_RDWR)
        sending.join(240)
