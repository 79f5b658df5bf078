"""Downloads from a test server that breaks connections, refuses requests, or sends wrong data."""

import hashlib
import http.server
import io
import json
import tarfile
import threading

import pytest

from storage.corpora import CorpusError
from storage.corpora.catalog import CATALOG, Archive, Download, find_download
from storage.corpora.download import DownloadError, Patience, download_corpus
from storage.corpora.unpack import UnsafeArchiveError

HURRY = Patience(attempts=3, pause_s=0.01, timeout_s=5.0)


def make_archive():
    """A tar.gz of one utterance in LibriSpeech's layout, some 300 kB that do not compress."""
    noise = b"".join(hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(10_000))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in (("S/d/1/2/1-2-0000.flac", noise), ("S/d/1/2/1-2.trans.txt", b"1-2-0000 HELLO\n")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves one file; `breaks`: after how many bytes each connection ends, `ranges`: whether it can continue."""

    def __init__(self, content):
        self.content, self.breaks, self.ranges, self.status, self.asked = content, [], True, 0, []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/d.tar.gz"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append(wanted)
        if server.status:
            status = server.status if isinstance(server.status, int) else server.status.pop(0)
            if status != 200:
                self.send_error(status)
                return
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "http://example.invalid/d.tar.gz")
            self.end_headers()
            return
        content, first = server.content, 0
        if wanted and server.ranges:
            first = int(wanted.removeprefix("bytes=").rstrip("-"))
            if first >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        body = content[first:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.breaks.pop(0)] if server.breaks else body)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server(make_archive()) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join(10)


def catalog(server, digest=None, url=None):
    known = f"sha256:{hashlib.sha256(server.content).hexdigest()}" if digest is None else digest
    archive = Archive(url or server.url, 1, known)
    return {"tiny": Download("librispeech", "CC0", "https://example.org", {"d": archive}, ("d",), "S")}


def fetch(server, folder, **options):
    known = catalog(server, options.pop("digest", None), options.pop("url", None))
    return download_corpus("tiny", folder, catalog=known, patience=HURRY, **options)


def test_archive_is_downloaded_unpacked_and_marked(server, tmp_path):
    seen = []
    fetched = fetch(server, tmp_path, on_progress=lambda *state: seen.append(state))
    assert (fetched["kind"], fetched["path"]) == ("librispeech", str(tmp_path / "tiny" / "S"))
    assert (tmp_path / "tiny" / "S" / "d" / "1" / "2" / "1-2.trans.txt").read_bytes() == b"1-2-0000 HELLO\n"
    marker = json.loads((tmp_path / "tiny" / ".d.completed").read_text())
    assert (marker["files"], marker["url"]) == (2, server.url)
    assert ("d.tar.gz", len(server.content), len(server.content)) in seen
    assert not list((tmp_path / "tiny").glob("d.tar.gz*"))
    again = fetch(server, tmp_path)
    assert again["parts"]["d"]["present"]
    assert len(server.asked) == 1


def test_download_continues_after_broken_connections(server, tmp_path):
    server.breaks = [100_000, 0, 50_000, 0, 0]
    fetch(server, tmp_path, keep_archives=True)
    assert server.asked == [None, "bytes=100000-", "bytes=100000-", "bytes=150000-", "bytes=150000-", "bytes=150000-"]
    assert (tmp_path / "tiny" / "d.tar.gz").read_bytes() == server.content


def test_later_command_continues_the_download(server, tmp_path):
    server.breaks = [100_000, 0, 0, 0]
    with pytest.raises(DownloadError, match=r"run the same command again"):
        fetch(server, tmp_path)
    assert (tmp_path / "tiny" / "d.tar.gz.part").stat().st_size == 100_000
    assert not (tmp_path / "tiny" / ".d.completed").exists()
    fetch(server, tmp_path)
    assert server.asked[-1] == "bytes=100000-"


def test_download_restarts_if_server_cannot_continue(server, tmp_path):
    server.breaks, server.ranges = [100_000], False
    fetch(server, tmp_path)
    assert server.asked == [None, "bytes=100000-"]


def test_complete_part_file_is_not_downloaded_again(server, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "d.tar.gz.part").write_bytes(server.content)
    fetch(server, tmp_path)
    assert server.asked == [f"bytes={len(server.content)}-"]


def test_part_file_that_is_too_long_is_downloaded_again(server, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "d.tar.gz.part").write_bytes(server.content + b"more")
    fetch(server, tmp_path)
    assert server.asked[-1] is None


def test_transient_errors_are_retried(server, tmp_path):
    server.status = [503, 429, 200]
    fetch(server, tmp_path)
    assert len(server.asked) == 3


def test_permanent_errors_are_not_retried(server, tmp_path):
    server.status = 404
    with pytest.raises(DownloadError, match=r"Not Found.*put it at .*d\.tar\.gz"):
        fetch(server, tmp_path)
    assert len(server.asked) == 1


def test_file_with_wrong_digest_is_refused_and_deleted(server, tmp_path):
    with pytest.raises(DownloadError, match="md5 is"):
        fetch(server, tmp_path, digest="md5:" + "0" * 32)
    assert not list((tmp_path / "tiny").glob("d.tar.gz*"))
    assert not (tmp_path / "tiny" / "S").exists()


def test_offline_error_explains_manual_download_which_is_accepted(server, tmp_path):
    server.shutdown()
    server.server_close()
    with pytest.raises(DownloadError, match=rf"sha256:.*put it at {tmp_path}/tiny/d\.tar\.gz"):
        fetch(server, tmp_path)
    (tmp_path / "tiny" / "d.tar.gz").write_bytes(server.content)
    assert fetch(server, tmp_path)["parts"]["d"]["files"] == 2


def test_unsafe_addresses_are_refused(server, tmp_path):
    for url in ("http://example.org/x.tgz", "file:///etc/passwd", "ftp://example.org/x"):
        with pytest.raises(DownloadError, match="only https"):
            fetch(server, tmp_path, url=url)
    with pytest.raises(DownloadError, match="only https"):
        fetch(server, tmp_path, url=server.url.replace("d.tar.gz", "away"))


def test_dangerous_archive_leaves_no_marker(server, tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../evil"))
    server.content = buffer.getvalue()
    with pytest.raises(UnsafeArchiveError):
        fetch(server, tmp_path)
    assert not (tmp_path / "tiny" / ".d.completed").exists()


def test_unknown_names_suggest_the_nearest(server, tmp_path):
    with pytest.raises(CorpusError, match="did you mean 'librispeech'"):
        download_corpus("librispech", tmp_path)
    with pytest.raises(CorpusError, match="no part 'x'; it has: d"):
        fetch(server, tmp_path, parts=("x",))


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_catalog_is_consistent(name):
    from storage.corpora import READERS

    corpus = find_download(name)
    assert corpus.kind in READERS
    assert corpus.licence
    assert set(corpus.default) <= set(corpus.parts)
    for archive in corpus.parts.values():
        assert archive.url.startswith("https://")
        algorithm, _, digest = archive.digest.partition(":")
        assert len(digest) == {"": 0, "md5": 32, "sha256": 64}[algorithm]
