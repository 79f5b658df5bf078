"""Backends of `ObjectStore`: the local disk, or any fsspec file system.

Backends use full paths in their own format; `storage.objects` validates names and retries. To add a kind of store, add
an entry to `BACKENDS`.
"""

import hashlib
import json
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from storage.publishing import TEMP_PREFIX, publish_file, sweep_temporary_files, temporary_file


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
        for parent, _, names in os.walk(folder):
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

    def size(self, path: str) -> int:
        with self._lock:
            info = self._fs.info(path)
        if info.get("type") != "file":
            raise FileNotFoundError(2, "no such object", path)
        return int(info["size"])

    def read(self, path: str, start: int, end: int | None) -> bytes:
        if start == 0 and end is None:
            with self._lock:
                return bytes(self._fs.cat_file(path))
        # For a range beyond the object, servers return an error, where a file returns no bytes.
        end = min(self.size(path), end if end is not None else 1 << 62)
        if start >= end:
            return b""
        with self._lock:
            data = bytes(self._fs.cat_file(path, start=start, end=end))
        if len(data) != end - start:
            raise ConnectionError(f"got {len(data)} of {end - start} bytes")
        return data

    def put(self, path: str, data: bytes) -> None:
        with self._lock:
            self._fs.pipe_file(path, data)

    def put_file(self, path: str, source: Path, consume: bool) -> None:
        with self._lock:
            self._fs.put_file(str(source), path)

    def get_file(self, path: str, target: Path) -> None:
        expected = self.size(path)
        with self._lock:
            self._fs.get_file(path, str(target))
        if target.stat().st_size != expected:
            raise ConnectionError(f"got {target.stat().st_size} of {expected} bytes")

    def walk(self, folder: str) -> Iterator[Entry]:
        with self._lock:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(folder, detail=True)
            except FileNotFoundError:
                return
        for path, info in found.items():
            name = str(path)
            if not name.endswith("/") and not name.rpartition("/")[2].startswith(TEMP_PREFIX):
                at = info.get("LastModified") or info.get("modified") or info.get("created") or 0.0
                yield Entry(name, int(info["size"]), at if isinstance(at, float | int) else at.timestamp())

    def delete(self, path: str) -> None:
        with self._lock, suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def delete_tree(self, folder: str) -> None:
        paths = [entry.path for entry in self.walk(folder)]
        bulk = getattr(self._fs, "bulk_delete", None)
        for first in range(0, len(paths), 1000 if bulk else 1):
            if bulk:  # S3 deletes up to 1,000 keys in one request
                bulk(paths[first : first + 1000])
            else:
                self.delete(paths[first])


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
    try:
        import s3fs
    except ImportError as error:
        raise ValueError("s3:// needs the package s3fs: pip install s3fs") from error
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
    settings = {"skip_instance_cache": True, "use_listings_cache": False, "config_kwargs": config, **options}
    filesystem = s3fs.S3FileSystem(endpoint_url=endpoint, **settings)
    filesystem.retries = 1  # a third loop of retries would multiply the other two and delay errors by minutes
    return _FsspecBackend(filesystem)


BACKENDS: dict[str, Callable[[Mapping[str, Any]], Backend]] = {
    "file": _make_local,
    "memory": _make_memory,
    "s3": _make_s3,
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
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    identity = json.dumps([variables, dict(options)], sort_keys=True, default=repr)
    key = (os.getpid(), protocol, hashlib.sha256(identity.encode()).hexdigest())
    with _cache_lock:
        if key not in _cache:
            _cache[key] = BACKENDS[protocol](options)
        return _cache[key]
