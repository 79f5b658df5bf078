"""A request for a stream that the library of WebSockets does not accept was never answered.

It was one with a body, with more than 128 headers or with a line of more than 8 kB, such as many cookies. Its
connection stayed open as long as the client liked, without a token, and was counted among those that a server may have;
and the server could not end without a traceback, which cut off the requests in progress. Refused streams, and text that
is not UTF-8, were also printed as errors of the server.
"""

import json
import socket
from contextlib import closing

import pytest
from support import load_beside, wait_until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

server_of_tones = load_beside(__file__, "../recognition/running_server.py")
HEAD = (
    b"GET /stream?sample_rate=16000 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    return server_of_tones.tone_transcriber(tmp_path_factory.mktemp("tones"))


@pytest.mark.parametrize(
    "rest",
    [
        b"Cookie: " + b"c" * 9000 + b"\r\n\r\n",
        b"".join(b"X-%d: 1\r\n" % number for number in range(130)) + b"\r\n",
        b"Content-Length: 4\r\n\r\nbody",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["line", "headers", "body", "chunks"],
)
def test_a_stream_that_cannot_be_opened_is_answered_and_its_connection_closed(transcriber, rest):
    with server_of_tones.running(transcriber) as server:
        with closing(socket.create_connection(("127.0.0.1", server.port), timeout=240)) as connection:
            connection.sendall(HEAD + rest)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        wait_until(lambda: not server.server.server_state.connections)
    assert answer.startswith(b"HTTP/1.1 400 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert "without a body, with at most 128 headers and 8192 bytes in a line" in error["message"]


def test_what_clients_send_wrongly_is_not_printed(transcriber, caplog):
    with server_of_tones.running(transcriber) as server:
        with pytest.raises(InvalidStatus), server_of_tones.stream(server, "&partial_ms=soon"):
            pass
        with server_of_tones.stream(server) as connection:
            connection.recv(240)
            connection.socket.sendall(Frame(Opcode.TEXT, b"\xff").serialize(mask=True))
            with pytest.raises(ConnectionClosed):
                connection.recv(240)
            assert connection.close_code == 1007
        wait_until(lambda: not server.server.server_state.tasks)
    assert [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"] == []
