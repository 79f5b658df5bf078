"""An endpoint that answers every request with status 200 and a login page: a backup reported 203 stored artifacts.

Also servers that accept writes and do not keep them, and refusals whose HEAD answer has no reason.
"""

import hashlib
import sqlite3
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.servers.backup import backup
from storage.objects import ObjectStore, ObjectStoreError, RetryPolicy

LISTING = (
    '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>speech</Name><IsTruncated>false'
    "</IsTruncated>%s</ListBucketResult>"
)
OBJECT = "<Contents><Key>%s</Key><Size>%d</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
ERROR = "<Error><Code>%s</Code><Message>refused</Message></Error>"


class SmallServer(ThreadingHTTPServer):
    """Behaves as `habit` says: as a login page, as an error of S3, or as an S3 server that may lose objects."""

    daemon_threads = True

    def __init__(self):
        self.habit, self.objects = "", {}
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        habit, path = self.server.habit, self.path.partition("?")[0]
        if habit == "login" or path == "/login":
            self.answer(200, b"<html><body>Please log in</body></html>", **{"Content-Type": "text/html"})
        elif habit == "broken page":
            self.answer(200, b"<!DOCTYPE html><p>Log in<br>", **{"Content-Type": "text/html; charset=utf-8"})
        elif habit == "missing page":
            self.answer(404, b"<html>not found</html>", **{"Content-Type": "text/html"})
        elif habit == "json":
            self.answer(200, b'{"error": "log in"}', **{"Content-Type": "application/json"})
        elif habit == "redirects":
            self.answer(302, b"", Location="/login")
        elif habit.startswith("refuses"):
            _, code, status = habit.split()
            self.answer(int(status), (ERROR % code).encode(), **{"Content-Type": "application/xml"})
        elif self.command == "PUT":
            if habit != "forgets":
                self.server.objects[path] = data[:-1] if habit == "truncates" else data
            self.answer(200, b"", ETag=f'"{hashlib.sha256(data).hexdigest()[:32]}"')  # as with SSE-KMS: not the MD5
        elif path in self.server.objects:
            self.answer(200, self.server.objects[path], ETag='"0"')
        elif path.count("/") == 1:
            listing = "".join(OBJECT % (name.split("/", 2)[2], len(data)) for name, data in self.server.objects.items())
            self.answer(200, (LISTING % listing).encode(), **{"Content-Type": "application/xml"})
        else:
            self.answer(404, (ERROR % "NoSuchKey").encode(), **{"Content-Type": "application/xml"})

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def answer(self, status, body, **headers):
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    """One for all tests: a client of S3 takes a tenth of a second to build, and fsspec keeps it for an address."""
    server = SmallServer()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def start(server, monkeypatch):
    """Gives the server a habit, and returns it and an empty store there."""

    def begin(habit):
        server.habit, server.objects = habit, {}
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "some-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "some-secret")
        return server, ObjectStore("s3://speech/runs", retry=RetryPolicy(attempts=2, base_s=0.0))

    return begin


CALLS = {
    "write": lambda store, path: store.write("a", b"1234"),
    "write_file": lambda store, path: store.write_file("a", path),
    "read": lambda store, path: store.read("a"),
    "range": lambda store, path: store.read("a", 1, 3),
    "size": lambda store, path: store.size("a"),
    "exists": lambda store, path: store.exists("a"),
    "fetch": lambda store, path: store.fetch_into("a", path),
    "list": lambda store, path: store.list(),
    "delete": lambda store, path: store.delete("a"),
    "delete_tree": lambda store, path: store.delete_tree(""),
}


@pytest.mark.parametrize("habit", ["login", "broken page", "missing page", "json", "redirects"])
def test_no_call_accepts_the_answers_of_another_service(start, tmp_path, habit):
    server, store = start(habit)
    file = tmp_path / "file"
    file.write_bytes(b"1234")
    for name, call in CALLS.items():
        if (habit, name) == ("json", "delete"):
            continue  # S3 answers a deletion with an empty page, which proves nothing
        with pytest.raises(ObjectStoreError, match=r"s3://speech/runs.*AWS_ENDPOINT_URL") as caught:
            call(store, file)
        assert f"http://127.0.0.1:{server.server_address[1]} answered" in str(caught.value), name


@pytest.mark.parametrize(("habit", "kept"), [("forgets", "nothing"), ("truncates", "3 bytes")])
@pytest.mark.parametrize("way", ["write", "write_file"])
def test_object_that_is_not_kept_is_an_error(start, tmp_path, habit, kept, way):
    _, store = start(habit)
    file = tmp_path / "file"
    file.write_bytes(b"1234")
    with pytest.raises(ObjectStoreError, match=f"runs/a: failed after 2 attempts .*accepted 4 bytes, and has {kept}"):
        CALLS[way](store, file)


def test_other_etags_than_the_md5_are_accepted(start, tmp_path):
    _, store = start("encrypts")
    store.write("a", b"1234")
    (tmp_path / "file").write_bytes(b"12345")
    store.write_file("b", tmp_path / "file")
    assert (store.read("a"), store.read("b")) == (b"1234", b"12345")


@pytest.mark.parametrize(
    ("habit", "remedy"),
    [
        ("refuses ExpiredToken 400", "set new values of .*AWS_SESSION_TOKEN"),
        ("refuses RequestTimeTooSkewed 403", "clock"),
        ("refuses PermanentRedirect 301", "AWS_DEFAULT_REGION"),
    ],
)
@pytest.mark.parametrize("way", ["write", "exists", "read", "list"])
def test_refusals_have_their_own_remedy(start, tmp_path, habit, remedy, way):
    _, store = start(habit)
    with pytest.raises(ObjectStoreError, match=remedy) as caught:
        CALLS[way](store, tmp_path / "file")
    assert "attempts" not in str(caught.value)


def test_missing_bucket_is_no_empty_store(start):
    _, store = start("refuses NoSuchBucket 404")
    with pytest.raises(ObjectStoreError, match="Create the bucket"):
        store.list()


def test_backup_is_not_reported_before_the_store_has_it(home, start):
    for name in ("prefect", "mlflow"):
        (home / name).mkdir(parents=True)
        with closing(sqlite3.connect(home / name / f"{name}.db")) as made, made:
            made.execute("CREATE TABLE notes (text)")
    start("login")
    with pytest.raises(ObjectStoreError, match="AWS_ENDPOINT_URL"):
        backup("s3://speech/backups")
