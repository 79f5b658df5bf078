"""Downloads public corpora: resumable, verified, unpacked safely, and marked when complete.

    download_corpus("mini_librispeech", Path("corpora"), parts=("dev-clean-2",))

creates `corpora/mini_librispeech/LibriSpeech/dev-clean-2/…` and, last, `.dev-clean-2.completed`.
"""

import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from configurable.files import replace_file
from storage.corpora.base import CorpusError
from storage.corpora.catalog import Archive, Download, find_download
from storage.corpora.unpack import unpack
from storage.locks import file_lock

_BLOCK = 1 << 18  # bytes between two reports of progress
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LASTING = frozenset({400, 401, 403, 404, 405, 410, 451})  # HTTP's answers that another try does not change

Progress = Callable[[str, int, int], None]
"""Called with the file name, the bytes so far, and the total (0: unknown)."""


class DownloadError(OSError):
    """A file cannot be fetched, or is not the expected one; the message contains the remedy."""


@dataclass(frozen=True)
class Patience:
    """Limits of retries.

    Attributes:
        attempts: consecutive attempts without any received byte.
        restarts: total number of connections.
        pause_s: wait before the second attempt, doubled before each further one, at most a minute.
        timeout_s: time-out of a silent connection.
    """

    attempts: int = 5
    restarts: int = 1000
    pause_s: float = 1.0
    timeout_s: float = 30.0


def download_corpus(
    name: str,
    to: Path,
    parts: Sequence[str] = (),
    *,
    keep_archives: bool = False,
    on_progress: Progress = lambda file, done, total: None,
    patience: Patience | None = None,
    catalog: dict[str, Download] | None = None,
) -> dict[str, Any]:
    """Fetch and unpack parts of a corpus; skips complete parts.

    Args:
        name: key of the catalog.
        to: folder in which a folder with the corpus' name is created.
        parts: parts to fetch; the catalog's defaults if empty.
        keep_archives: keep archives after unpacking.
        on_progress: called while data are fetched.
        patience: limits of retries.
        catalog: catalog to use instead of `CATALOG`.

    Returns:
        `path` and `kind` for `open_corpus`, and `parts`: for each part, its files and bytes, or that it was present.

    Raises:
        CorpusError: the corpus or part is unknown.
        DownloadError: a file cannot be fetched, or its digest is wrong.
        UnsafeArchiveError: the archive is damaged, or contains members that must not be unpacked.
    """
    corpus = find_download(name, catalog)
    wanted = tuple(parts) or corpus.default
    if unknown := [part for part in wanted if part not in corpus.parts]:
        raise CorpusError(f"{name} has no part {unknown[0]!r}; it has: {', '.join(corpus.parts)}")
    folder = to / name
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    with file_lock(folder / ".download.lock", wait_s=5.0):
        for part in wanted:
            marker = folder / f".{part}.completed"
            if marker.is_file():
                done[part] = {"files": 0, "bytes": 0, "left_out": 0, "present": True}
                continue
            archive = fetch(corpus.parts[part], folder, on_progress, patience or Patience())
            on_progress(f"unpacking {archive.name}", 0, 0)
            unpacked = asdict(unpack(archive, folder))
            about = {"url": corpus.parts[part].url, "digest": corpus.parts[part].digest, **unpacked}
            replace_file(marker, json.dumps(about).encode())
            done[part] = {**unpacked, "present": False}
            if not keep_archives:
                archive.unlink()
    return {"kind": corpus.kind, "path": os.path.normpath(folder / corpus.folder), "parts": done}


def fetch(archive: Archive, folder: Path, on_progress: Progress, patience: Patience) -> Path:
    """Fetch a file, resuming a previous attempt.

    Raises:
        DownloadError: the file cannot be fetched within the limits of `patience`, or its digest is wrong.
    """
    target = folder / archive.name
    if target.is_file():
        _check_digest(target, archive)
        return target
    _check_address(archive.url)
    partial = target.with_name(f"{target.name}.part")
    idle, had = 0, _size(partial)
    for _ in range(patience.restarts):
        try:
            if _continue(archive, partial, on_progress, patience.timeout_s):
                _check_digest(partial, archive)
                partial.replace(target)
                return target
            error: Exception = ConnectionError("the connection ended early")
        except urllib.error.HTTPError as refusal:
            error = refusal
            if refusal.code in _LASTING:
                break
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as trouble:
            error = trouble
        idle = 0 if _size(partial) > had else idle + 1
        had = _size(partial)
        if idle >= patience.attempts:
            break
        time.sleep(min(60.0, patience.pause_s * 2.0**idle))
    raise DownloadError(_by_hand(archive, target, error)) from error


def _continue(archive: Archive, partial: Path, on_progress: Progress, timeout_s: float) -> bool:
    """Fetch the missing bytes; returns whether the file is complete."""
    have = _size(partial)
    headers = {"User-Agent": "starling", "Accept-Encoding": "identity"}
    request = urllib.request.Request(archive.url, headers=headers)  # noqa: S310  # fetch has checked the address
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.build_opener(_Redirects()).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        if error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
            return True  # the previous attempt received everything
        partial.unlink()
        return False
    with answer:
        if have and (answer.status != 206 or _first_byte(answer.headers.get("Content-Range", "")) != have):
            have = 0  # the server cannot resume, or resumes at another position
            if answer.status == 206:
                partial.unlink()
                return False
        length = answer.headers.get("Content-Length", "")
        total = have + int(length) if length.isdigit() else 0
        _check_space(partial, total - have)
        with partial.open("ab" if have else "wb") as file:
            got = _copy(answer, file, have, lambda done: on_progress(archive.name, done, total))
    return got == total if total else True


def _copy(answer: IO[bytes], file: IO[bytes], done: int, report: Callable[[int], None]) -> int:
    while block := answer.read(_BLOCK):
        file.write(block)
        done += len(block)
        report(done)
    return done


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_address(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise DownloadError(f"{url} is not fetched: only https addresses are allowed")


def _check_space(partial: Path, wanted: int) -> None:
    free = shutil.disk_usage(partial.parent).free
    if wanted > free:
        raise DownloadError(
            f"{partial.parent} has {free >> 20} MiB free, but {wanted >> 20} MiB are needed: free some space"
        )


def _check_digest(path: Path, archive: Archive) -> None:
    algorithm, _, expected = archive.digest.partition(":")
    if not expected:
        return
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        path.unlink()
        raise DownloadError(
            f"{path} was damaged in transit, or is another file: its {algorithm} is {digest.hexdigest()} instead of "
            f"{expected}. It was deleted: run the command again."
        )


def _by_hand(archive: Archive, target: Path, error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    check = f" ({archive.digest})" if archive.digest else ""
    return (
        f"{archive.url} cannot be fetched ({reason}). Without a connection, fetch this file elsewhere{check}, put it "
        f"at {target}, and run the same command again; it then only unpacks."
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _first_byte(content_range: str) -> int:
    first = content_range.removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdigit() else -1
