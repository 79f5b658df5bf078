"""Backends of `ObjectStore`: the local disk, or any fsspec file system.

Backends use full paths in their own format; `storage.objects` validates names and retries. To add a kind of store, add
an entry to `BACKENDS`; for a file system of fsspec with atomic puts that is one line, see `of_fsspec`.

A write counts only if the store proves it: by an ETag that is the data's MD5, or else by the object's size afterwards.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from configurable.files import TEMP_PREFIX, publish_file
from configurable.folders import walk_folders
from storage.publishing import sweep_temporary_files, temporary_file
from storage.retries import ForeignAnswerError, store_code


class Entry(NamedTuple):
    """An object in a listing: path or name, size in bytes, and time of the last change (seconds since 1970)."""

    path: str
    size: int
    modified: float


class Backend(ABC):
    """Objects under slash-separated paths."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Size in bytes; raises FileNotFoundError if there is no such object (folders are not objects)."""

    @abstractmethod
    def read(self, path: str, start: int, end: int | None) -> bytes:
        """Read the bytes from `start` to `end` (exclusive; None for the end of the object)."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write or replace the object atomically."""

    @abstractmethod
    def put_file(self, path: str, source: Path, consume: bool) -> None:
        """Write a local file's content atomically; with `consume`, the file may be moved."""

    @abstractmethod
    def get_file(self, path: str, target: Path) -> None:
        """Copy the object to a local file."""

    @abstractmethod
    def walk(self, folder: str) -> Iterator[Entry]:
        """Yield all objects below a folder with their full paths, except temporary files."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object; does nothing if it does not exist."""

    @abstractmethod
    def delete_tree(self, folder: str) -> None:
        """Delete everything below a folder, including temporary files."""

    def scratch(self, path: str) -> Path | None:
        """Folder for the temporary file that will become `path`; None for the system's temporary folder."""
        return None

    def sweep(self, folder: str) -> None:
        """Remove temporary files of killed writers below a folder; does nothing if the store has none."""
        return


class _LocalBackend(Backend):
    """The local file system; data are written to a temporary file in the same folder, synced, and renamed."""

    def size(self, path: str) -> int:
        target = Path(path)
        if target.is_dir():
            raise FileNotFoundError(2, "is a folder, not an object", path)
        return target.stat().st_size

    def read(self, path: str, start: int, end: int | None) -> bytes:
        with Path(path).open("rb") as file:
            file.seek(start)
            return file.read() if end is None else file.read(end - start)

    def put(self, path: str, data: bytes) -> None:
        with temporary_file(self.scratch(path), path) as (file, source):
            file.write(data)
            self.put_file(path, source, consume=True)

    def put_file(self, path: str, source: Path, consume: bool) -> None:
        target = Path(path)
        if not consume:
            with temporary_file(self.scratch(path), path) as (file, copy), source.open("rb") as original:
                shutil.copyfileobj(original, file, 1 << 20)
                self.put_file(path, copy, consume=True)
            return
        publish_file(source, target)

    def get_file(self, path: str, target: Path) -> None:
        shutil.copyfile(path, target)

    def walk(self, folder: str) -> Iterator[Entry]:
        for parent, _, names in walk_folders(folder):
            for name in names:
                path = f"{parent.rstrip('/')}/{name}"
                with suppress(FileNotFoundError):  # deleted meanwhile
                    if not name.startswith(TEMP_PREFIX):
                        status = Path(path).stat()
                        yield Entry(path, status.st_size, status.st_mtime)

    def delete(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def delete_tree(self, folder: str) -> None:
        while Path(folder).exists():
            with suppress(FileNotFoundError):  # another process may be deleting the same folder
                shutil.rmtree(folder)

    def sweep(self, folder: str) -> None:
        for parent, _, names in os.walk(folder):
            if any(name.startswith(TEMP_PREFIX) for name in names):
                sweep_temporary_files(Path(parent))

    def scratch(self, path: str) -> Path | None:
        folder = Path(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class _FsspecBackend(Backend):
    """Any fsspec file system with an atomic put (object stores, memory)."""

    def __init__(self, filesystem: Any, lock: AbstractContextManager[Any] | None = None) -> None:
        self._fs = filesystem
        self._lock = lock or nullcontext()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Hold the lock, and convert the errors of libraries about answers that they cannot read."""
        try:
            with self._lock:
                yield
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ForeignAnswerError(f"unexpected answer: {type(error).__name__}: {error}") from error
        except OSError as error:
            if type(error) is OSError and str(error).startswith("Forbidden: "):  # gcsfs has no type for it
                raise PermissionError(str(error)) from error
            raise

    def size(self, path: str) -> int:
        with self._asking():
            info = self._fs.info(path)
            if info.get("type") != "file":
                raise FileNotFoundError(2, "no such object", path)
            if not info.get("etag", True):  # adlfs takes any answer with status 200 for an object
                raise ForeignAnswerError("the answer has no ETag")
            return int(info["size"])

    def read(self, path: str, start: int, end: int | None) -> bytes:
        # For a range beyond the object, servers return an error, where a file returns no bytes.
        end = min(self.size(path), end if end is not None else 1 << 62)
        if start >= end:
            return b""
        with self._asking():
            data = bytes(self._fs.cat_file(path, start=start, end=end))
        if len(data) != end - start:
            raise ConnectionError(f"got {len(data)} of {end - start} bytes")
        return data

    def put(self, path: str, data: bytes) -> None:
        with self._asking():
            answer = self._fs.pipe_file(path, data)
            if not self._proves(answer, data):
                self._check_size(path, len(data))

    def put_file(self, path: str, source: Path, consume: bool) -> None:
        with self._asking():
            self._fs.put_file(str(source), path)
            self._check_size(path, source.stat().st_size)

    def _proves(self, answer: Any, data: bytes) -> bool:
        """Whether the answer to a put shows that the store has received these data."""
        return False

    def _check_size(self, path: str, size: int) -> None:
        """Check after a write that the object is there; raises ConnectionError, so that the write is repeated."""
        try:
            stored = f"{self.size(path)} bytes"
        except FileNotFoundError:
            stored = "nothing"
        if stored != f"{size} bytes":
            raise ConnectionError(f"the store accepted {size} bytes, and has {stored} under this name afterwards")

    def get_file(self, path: str, target: Path) -> None:
        expected = self.size(path)
        with self._asking():
            self._fs.get_file(path, str(target))
        if target.stat().st_size != expected:
            raise ConnectionError(f"got {target.stat().st_size} of {expected} bytes")

    def walk(self, folder: str) -> Iterator[Entry]:
        with self._asking():
            self._fs.invalidate_cache()
            try:
                entries = list(self._fs.find(folder, detail=True).items())
            except FileNotFoundError as error:
                if store_code(error) == "NoSuchBucket":
                    raise
                return
        for path, info in entries:
            name = str(path) if folder.startswith("/") else str(path).lstrip("/")
            if not name.endswith("/") and not name.rpartition("/")[2].startswith(TEMP_PREFIX):
                yield Entry(name, int(info["size"]), _changed_at(info))

    def delete(self, path: str) -> None:
        with self._asking(), suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def delete_tree(self, folder: str) -> None:
        paths = [entry.path for entry in self.walk(folder)]
        bulk = getattr(self._fs, "bulk_delete", None)
        for first in range(0, len(paths), 1000 if bulk else 1):
            if bulk:  # S3 deletes up to 1,000 keys in one request
                with self._asking():
                    bulk(paths[first : first + 1000])
            else:
                self.delete(paths[first])


def _changed_at(info: Mapping[str, Any]) -> float:
    """Time of the last change in a listing, in seconds since 1970; each file system has its own name for it."""
    names = ("LastModified", "last_modified", "mtime", "modified", "created")
    at = next((info[name] for name in names if info.get(name)), 0.0)
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    return float(at if isinstance(at, float | int) else at.timestamp())


class _S3Backend(_FsspecBackend):
    """S3-compatible servers."""

    def size(self, path: str) -> int:
        with self._reason_asked(path):
            return super().size(path)

    def read(self, path: str, start: int, end: int | None) -> bytes:
        with self._reason_asked(path):
            return super().read(path, start, end)

    def _proves(self, answer: Any, data: bytes) -> bool:
        # not the MD5 with SSE-KMS, after an upload in parts, and on some servers
        etag = str(answer.get("ETag", "")).strip('"') if isinstance(answer, dict) else ""
        return etag == hashlib.md5(data, usedforsecurity=False).hexdigest()

    @contextmanager
    def _reason_asked(self, path: str) -> Iterator[None]:
        """Ask for the reason of a refusal: the answer to a HEAD request has a status, but no error code."""
        try:
            yield
        except OSError as error:
            if store_code(error) in {"400", "403"}:
                bucket, _, key = path.partition("/")
                self._fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)
            raise


_PROOFS = {
    "ListObjectsV2": b"<ListBucketResult",
    "DeleteObjects": b"<DeleteResult",
    "CreateMultipartUpload": b"<UploadId>",
    "CompleteMultipartUpload": b"<",  # botocore detects an error in its body
}
"""What the body of a successful answer has, by operation."""
_TAGGED = ("PutObject", "UploadPart", "GetObject", "HeadObject")
"""Operations whose successful answers have an ETag."""


def _check_answer(endpoint: str) -> Callable[..., None]:
    """A hook for botocore that rejects answers of what is no S3 server, such as a login page with status 200."""

    from botocore.exceptions import ClientError

    def check(operation_model: Any, response_dict: Mapping[str, Any], **_: Any) -> None:
        operation, status = operation_model.name, int(response_dict["status_code"])
        headers = {str(name).lower(): str(value) for name, value in response_dict["headers"].items()}
        body = response_dict["body"]
        body = body if isinstance(body, bytes) else b""
        page = headers.get("content-type", "").startswith("text/html")
        tagged = bool(headers.get("etag"))
        # proxies in front of S3 servers send pages with status 502 to 504 while these restart
        if page and status < 500 and not (tagged and operation in ("GetObject", "HeadObject")):
            raise ForeignAnswerError(f"{endpoint} answered {operation} with a web page (status {status})")
        proven = (tagged or operation not in _TAGGED) and _PROOFS.get(operation, b"") in body
        if status in (302, 303) or (status < 300 and not proven):
            raise ForeignAnswerError(f"{endpoint} answered {operation} with status {status}, but not as S3 does")
        # botocore follows a redirection to a region that is named, and asks without end for one that is not
        if status in (301, 307, 308) and "x-amz-bucket-region" not in headers and b"<Region>" not in body:
            reason = {"Code": "PermanentRedirect", "Message": "the server names no region"}
            raise ClientError({"Error": reason, "ResponseMetadata": {"HTTPStatusCode": status}}, operation)

    return check


def _make_local(options: Mapping[str, Any]) -> Backend:
    if options:
        raise ValueError(f"a local folder has no option {sorted(options)[0]!r}: remove it")
    return _LocalBackend()


_memory_lock = threading.RLock()


def _make_memory(options: Mapping[str, Any]) -> Backend:
    import fsspec

    # fsspec's memory file system is one dictionary per process; listing it while another thread writes would fail.
    return _FsspecBackend(fsspec.filesystem("memory", **options), _memory_lock)


def _make_s3(options: Mapping[str, Any]) -> Backend:
    import s3fs
    from aiobotocore.session import AioSession

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint and "@" in urlsplit(endpoint).netloc:
        raise ValueError(
            "AWS_ENDPOINT_URL contains credentials: put them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    config: dict[str, Any] = {
        # Not all S3-compatible servers send the checksums that newer clients require in every response.
        "response_checksum_validation": "when_required",
        "request_checksum_calculation": "when_required",
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        "retries": {"mode": "standard", "total_max_attempts": 2},  # for parts of an upload; we retry whole calls
    }
    if endpoint and "amazonaws.com" not in endpoint:
        config["s3"] = {"addressing_style": "path"}  # bucket.host needs a DNS entry per bucket
    session = AioSession()
    for operation in (*_TAGGED, *_PROOFS, "DeleteObject"):
        # botocore calls hooks for any service before those for one, whose first sets the status of answers that it
        # cannot parse to 500
        session.register(f"before-parse.*.{operation}", _check_answer(endpoint or "Amazon S3"))
    settings = {**_UNCACHED, "config_kwargs": config, **options}
    filesystem = s3fs.S3FileSystem(endpoint_url=endpoint, session=session, **settings)
    filesystem.retries = 1  # a third loop of retries would multiply the other two and delay errors by minutes
    return _S3Backend(filesystem)


_UNCACHED = {"skip_instance_cache": True, "use_listings_cache": False}


@dataclass(frozen=True)
class BackendKind:
    """How the backends of a protocol are made, and what they need."""

    make: Callable[[Mapping[str, Any]], Backend]
    package: str = ""
    """Package that must be installed."""
    extra: str = ""
    """Extra of this project that installs it."""
    variables: tuple[str, ...] = ()
    """Beginnings of the names of environment variables with endpoint and credentials."""
    patient: bool = False
    """Whether the package repeats failed requests itself, for about half a minute."""

    @property
    def missing(self) -> str:
        """What to install if the package is not there, else empty."""
        if not self.package or find_spec(self.package) is not None:
            return ""
        from configurable.extras import install_remedy

        return f"needs the package {self.package}: {install_remedy(self.extra)}"


def of_fsspec(protocol: str, package: str = "", extra: str = "", variables: tuple[str, ...] = ()) -> BackendKind:
    """A kind of store that is a file system of fsspec whose puts are atomic, with the system's own credentials."""

    def make(options: Mapping[str, Any]) -> Backend:
        import fsspec

        if package:
            logging.getLogger(package).setLevel(logging.CRITICAL)  # it logs tracebacks of errors that it also raises
        return _FsspecBackend(fsspec.filesystem(protocol, **{**_UNCACHED, **options}))

    return BackendKind(make, package, extra, variables, patient=True)


_GOOGLE = ("GOOGLE_", "GCLOUD_", "GCSFS_", "STORAGE_EMULATOR_HOST")
_AZURE = ("AZURE_",)

BACKENDS: dict[str, BackendKind] = {
    "file": BackendKind(_make_local),
    "memory": BackendKind(_make_memory),
    "s3": BackendKind(_make_s3, "s3fs", "pipeline", ("AWS_",)),
    "gs": of_fsspec("gs", "gcsfs", "gcs", _GOOGLE),
    "az": of_fsspec("az", "adlfs", "azure", _AZURE),
    "abfs": of_fsspec("abfs", "adlfs", "azure", _AZURE),
}

_cache: dict[tuple[int, str, str], Backend] = {}
_cache_lock = threading.Lock()


def _new_locks() -> None:
    """Replace the locks after a fork: another thread of the parent may have held one."""
    global _cache_lock, _memory_lock
    _cache_lock, _memory_lock = threading.Lock(), threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_locks)


def backend_for(protocol: str, options: Mapping[str, Any]) -> Backend:
    """The process's backend for a protocol, options and the current environment.

    Stores share connections, but never across a fork (s3fs is not fork-safe) or with different credentials.
    """
    kind = BACKENDS[protocol]
    variables = {name: value for name, value in os.environ.items() if name.startswith(kind.variables)}
    identity = json.dumps([variables, dict(options)], sort_keys=True, default=repr)
    key = (os.getpid(), protocol, hashlib.sha256(identity.encode()).hexdigest())
    with _cache_lock:
        if key not in _cache:
            _cache[key] = kind.make(options)
        return _cache[key]
