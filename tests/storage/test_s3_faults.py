"""A server that is overloaded, drops connections, or has a full disk: the client retries, or reports it."""

import http.client
import os
import random
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support import small_disk

from storage.index import ShardIndex
from storage.objects import ObjectStore, ObjectStoreError, RetryPolicy
from storage.reading import ShardReader
from storage.shards import Sample, build_index, load_part, write_shard

ROW = {"duration": 1.0, "num_frames": 16000, "sample_rate": 16000}
BUSY = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>Reduce your request rate.</Message></Error>"


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to a real server, except those for which `weather` selects a fault.

    `weather(number)` says what happens to a request: "" lets it pass, "reset" drops the connection, "cut" drops it in
    mid-answer, anything else is an S3 error code that is answered with status 503.
    """

    daemon_threads = True

    def __init__(self, server, weather):
        self.target, self.weather = server, weather
        self.seen: Counter[str] = Counter()
        self.number, self.lock = 0, threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    def next_fault(self):
        with self.lock:
            self.number += 1
            kind = self.weather(self.number)
            self.seen[kind] += 1
            return kind


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_any(self):
        kind = self.server.next_fault()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if kind in ("", "cut"):
            self.forward(body, kind == "cut")
        elif kind == "reset":
            self.drop()
        else:
            self.answer(503, {"Content-Type": "application/xml"}, BUSY % kind.encode())

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def drop(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def forward(self, body, cut):
        link = http.client.HTTPConnection("127.0.0.1", self.server.target.port, timeout=240)
        try:
            link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                link.putheader(name, value)
            link.endheaders(body or None)
            reply = link.getresponse()
            self.answer(reply.status, dict(reply.getheaders()), reply.read(), cut)
        finally:
            link.close()

    def answer(self, status, headers, body, cut=False):
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.drop()

    def log_message(self, *args):
        pass


@pytest.fixture
def start_faults(s3_server, monkeypatch):
    """Starts a faulty proxy between the stores of this test and the server."""
    begun = []

    def begin(weather):
        proxy = FaultyProxy(s3_server, weather)
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        begun.append(proxy)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
        return proxy

    yield begin
    for proxy in begun:
        proxy.shutdown()
        proxy.server_close()


def samples(shard):
    source = random.Random(shard)
    return [Sample(f"u{shard}-{number}", {"flac": source.randbytes(30_000)}, ROW) for number in range(4)]


PATIENT = RetryPolicy(attempts=12, base_s=0.01, cap_s=0.2)


_LIKE_SLOW_DOWN = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("ServiceUnavailable", "InternalError")]


@pytest.mark.parametrize("kind", ["SlowDown", *_LIKE_SLOW_DOWN, "reset", "cut"])
def test_writer_and_reader_survive_server_faults(start_faults, kind, tmp_path):
    source = random.Random(kind)
    proxy = start_faults(lambda number: kind if source.random() < 0.2 else "")
    store = ObjectStore(f"s3://speech/storm-{kind}", retry=PATIENT)
    parts = [write_shard(store, f"{shard}.tar", samples(shard), "flac") for shard in range(4)]
    build_index(parts, {}).write(store)
    reader = ShardReader(store, ShardIndex.read(store), tmp_path)
    for shard in range(4):
        assert reader.payload(4 * shard + 1) == samples(shard)[1].members["flac"]
    assert proxy.seen[kind] > 2
    assert store.list("parts") == [f"parts/{shard}.tar.json" for shard in range(4)]


def test_lasting_faults_are_an_error_naming_the_store(start_faults):
    start_faults(lambda number: "SlowDown")
    store = ObjectStore("s3://speech/lasting-storm", retry=RetryPolicy(attempts=3, base_s=0.01))
    with pytest.raises(ObjectStoreError, match=r"s3://speech/lasting-storm/x: failed after 3 attempts .*again"):
        store.write("x", b"1")


def test_wrong_secret_is_not_retried_and_not_revealed(start_faults, monkeypatch):
    proxy = start_faults(lambda number: "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-wrong-secret")
    store = ObjectStore("s3://speech/refused", retry=RetryPolicy(attempts=8, base_s=5.0))
    with pytest.raises(ObjectStoreError, match="AWS_SECRET_ACCESS_KEY") as caught:
        store.write("x", b"1")
    assert "planted" not in str(caught.value)
    assert proxy.number <= 2


@pytest.fixture
def small_disk_folder(tmp_path):
    """A file system of one megabyte."""
    with small_disk(tmp_path / "small") as folder:
        yield folder


def test_full_disk_is_explained_and_leaves_no_partial_object(small_disk_folder):
    store = ObjectStore(small_disk_folder, retry=RetryPolicy(attempts=8, base_s=5.0))
    done = write_shard(store, "0.tar", samples(0), "flac")
    with pytest.raises(ObjectStoreError, match=r"9\.tar.*Free some space"):
        write_shard(store, "9.tar", [Sample("x", {"flac": bytes(2_000_000)}, ROW)], "flac")
    assert store.list() == ["0.tar", "parts/0.tar.json"]
    assert load_part(store, "0.tar") == done
    assert load_part(store, "9.tar") is None
    assert len(os.listdir(small_disk_folder)) == 2


def test_cache_on_a_full_disk_evicts_and_continues(small_disk_folder, tmp_path):
    store = ObjectStore(f"memory://full-{random.getrandbits(60):x}")
    parts = [
        write_shard(store, f"{n}.tar", [Sample(f"u{n}", {"flac": random.Random(n).randbytes(400_000)}, ROW)], "flac")
        for n in range(5)
    ]
    reader = ShardReader(store, build_index(parts, {}), small_disk_folder, cache_bytes=10**9)
    for n in [0, 1, 2, 3, 4, 0, 2]:
        assert reader.payload(n) == random.Random(n).randbytes(400_000)
