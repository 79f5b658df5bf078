"""Slow, silent, half-closed, chattering and very many clients do not disturb others."""

import json
import os
import resource
import socket
import threading
from contextlib import closing, suppress

import pytest
from support import load_beside, wait_until

from recognition.serving import app, connections, gate

tones = load_beside(__file__, "running_server.py")
speak, flac, post, fetch = tones.speak, tones.flac, tones.post, tones.fetch


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    return tones.tone_transcriber(tmp_path_factory.mktemp("tones"))


@pytest.fixture
def server(transcriber, monkeypatch):
    monkeypatch.setattr(gate, "_DISCARD_S", 1.0)
    monkeypatch.setattr(gate, "_DISCARD_PAUSE_S", 0.3)
    transcriber.recognizer.model.__init__()
    with tones.running(transcriber, idle_s=0.5, connections=8, upload_s=2.0) as server:
        yield server


def opened(server, data=b"", source="127.0.0.1"):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=240, source_address=(source, 0))
    connection.sendall(data)
    return connection


def rest_of(connection):
    """What a connection gives until it is closed."""
    data = b""
    with suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def dropped(server, reason):
    """Connections that were closed without an answer."""
    lines = fetch(server.url + "/metrics")[2].decode().splitlines()
    start = f'starling_connections_dropped_total{{reason="{reason}"}}'
    return sum(float(line.split()[1]) for line in lines if line.startswith(start))


def assert_serves(server):
    """A request is answered; one that this machine is too busy to send within the server's limits is sent again."""

    def recognized():
        try:
            status, _, content = post(server, flac(speak("echo")))
        except OSError:
            return None
        return None if status == 408 else content

    assert wait_until(recognized) == {"text": "echo"}


def assert_ends(send):
    """Sending fails after a while, since the server has closed the connection."""

    def fails():
        try:
            send()
        except OSError:
            return True
        return False

    wait_until(fails, every_s=0.1)


HEAD = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 5000\r\n\r\n"
)


def test_clients_that_send_nothing_or_half_a_request_are_dropped(server):
    waiting = [opened(server, data) for data in (b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\n")]
    assert_serves(server)
    for connection in waiting:
        assert rest_of(connection) == b""


def test_a_client_that_trickles_its_headers_is_dropped(server):
    connection = opened(server, b"GET / HTTP/1.1\r\n")
    assert_ends(lambda: connection.sendall(b"X: y\r\n"))
    assert_serves(server)


def test_an_upload_that_stops_is_answered(server):
    def answer():  # empty if the connection was dropped before the beginning was sent
        with closing(opened(server, HEAD + b"--x\r\n")) as connection:
            return rest_of(connection)

    waiting = tones.in_background(wait_until, answer)
    assert_serves(server)
    answer = waiting.result()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "upload_too_slow"
    wait_until(lambda: server.service.admission.uploaded == 0)


def test_an_upload_that_trickles_is_answered(server):
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'

    def answer():  # empty if the connection was dropped before the beginning was sent
        with closing(opened(server, HEAD + part)) as connection, suppress(ConnectionError):
            connection.settimeout(0.1)
            while True:
                connection.sendall(b"-")
                with suppress(TimeoutError):
                    return connection.recv(65536)

    assert wait_until(answer).startswith(b"HTTP/1.1 408 ")


def test_half_closed_connections_are_given_up(server):
    connections = [opened(server, data) for data in (b"", HEAD, HEAD + b"--x\r\n")]
    for connection in connections:
        connection.shutdown(socket.SHUT_WR)
    for connection in connections:
        rest_of(connection)
    wait_until(lambda: not server.service.admission.clients)
    assert_serves(server)


def test_what_is_no_http_is_refused(server):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"garbage\r\n\r\n", b"\0" * 1000, b"A" * 100_000):
        connection = opened(server)
        with suppress(OSError):
            connection.sendall(data)
        answer = rest_of(connection)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 "), answer[:100]
    assert_serves(server)


def test_very_many_connections_do_not_keep_others_out(transcriber):
    with tones.running(transcriber, connections=8) as server:
        idle = [opened(server) for _ in range(40)]
        assert_serves(server)
        wait_until(lambda: len(server.server.server_state.connections) <= 8)
        for connection in idle:
            connection.close()
        assert dropped(server, "too_many") >= 30


REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def test_a_client_with_very_many_connections_loses_its_own_and_no_others(transcriber):
    with tones.running(transcriber, connections=8) as server:
        other = opened(server)
        wait_until(lambda: server.server.server_state.connections)
        many = [opened(server, source="127.0.0.2") for _ in range(40)]
        wait_until(lambda: dropped(server, "too_many") >= 33)
        other.sendall(REQUEST)
        assert rest_of(other).startswith(b"HTTP/1.1 200 ")
        for connection in many:
            connection.close()


def test_a_request_that_has_arrived_is_read_before_very_many_connections_are_accepted(transcriber):
    with tones.running(transcriber, connections=8) as server:
        assert_serves(server)
        begun, held = threading.Event(), threading.Event()
        blocking = tones.in_background(tones.on_loop, server, lambda: begun.set() or held.wait(240))
        assert begun.wait(240)
        first = opened(server, REQUEST)
        many = [opened(server) for _ in range(100)]
        held.set()
        assert blocking.result()
        assert rest_of(first).startswith(b"HTTP/1.1 200 ")
        for connection in many:
            connection.close()


def test_the_server_may_open_as_many_files_as_its_connections_need(transcriber):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 64 + len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with tones.running(transcriber, connections=few) as server:
            many = [opened(server) for _ in range(few)]
            assert_serves(server)
            for connection in many:
                connection.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_limits_that_need_more_open_files_than_the_system_allows_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 1000))
    with pytest.raises(ValueError, match=r"ulimit -Hn 1001.*--limit connections") as refused:
        connections.allow_files(1001, "use --limit connections")
    assert "the system allows 1000" in str(refused.value)


def test_an_answer_that_is_not_read_is_given_up(server, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(app.formats, "body", lambda *given: answered.set() or "a" * 30_000_000)
    body, headers = tones.form(flac(speak("echo")), model="tones")
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nContent-Type: {headers['Content-Type']}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    waiting = [opened(server, request)]

    def is_answered():  # asked again if the connection was dropped before the request was sent
        return answered.wait(5) or waiting.append(opened(server, request))

    wait_until(is_answered)
    wait_until(lambda: not server.server.server_state.tasks)
    for connection in waiting:
        connection.close()
    monkeypatch.undo()
    assert_serves(server)


def test_the_rest_of_a_refused_upload_is_not_read_for_ever(server):
    head = HEAD.replace(b"5000", b"900000000000")
    connection = opened(server, head)
    assert_ends(lambda: connection.sendall(b"-" * 1000))
    connection.close()
    assert_serves(server)
