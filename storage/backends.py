"""What an `ObjectStore` stands on: the local disk, or any fsspec file system.

A backend works with full paths of its own kind and neither retries nor validates names: `storage.objects` does.
A new kind of store is one entry in `BACKENDS`.
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
    """An object in a listing: its path or name, bytes, and the time of its last change (s since 1970)."""

    path: str
    size: int
    modified: float


class Backend(ABC):
    """Bytes under slash-separated paths below one root."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Size in bytes; FileNotFoundError when there is no such object (a folder is none)."""

    @abstractmethod
    def read(self, path: str, start: int, end: int | None) -> bytes:
        """The bytes from `start` to `end` (exclusive; None is the end of the object)."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Publishes the object atomically, replacing an older one."""

    @abstractmethod
    def put_file(self, path: str, source: Path, consume: bool) -> None:
        """Publishes a local file atomically; `consume` allows to move it."""

    @abstractmethod
    def get_file(self, path: str, target: Path) -> None:
        """Copies the object into a local file."""

    @abstractmethod
    def walk(self, folder: str) -> Iterator[Entry]:
        """All objects below a folder with their full paths, temporary ones left out."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Deletes one object; no error when it is absent."""

    @abstractmethod
    def delete_tree(self, folder: str) -> None:
        """Deletes everything below a folder, temporary files too."""

    def scratch(self, path: str) -> Path | None:
        """The folder where a file that will become `path` is best prepared; None is the system's temporary folder."""
        return None

    def sweep(self, folder: str) -> None:
        """Removes what killed writers have left below a folder; nothing where a store keeps no such thing."""
        return


class _LocalBackend(Backend):
    """The local file system. A write goes to a temporary file in the same folder, is synced, then renamed."""

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
            with suppress(FileNotFoundError):  # of two that delete at once each finds some of it gone
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
    """Any fsspec file system whose single put is atomic (object stores, memory)."""

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
        # A server answers a range outside the object with an error where a file gives no bytes.
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

    # fsspec's memory is one dictionary per process; listing it while another thread writes would fail.
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
        # S3-compatible servers do not all send the checksums that newer clients demand of every answer.
        "response_checksum_validation": "when_required",
        "request_checksum_calculation": "when_required",
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        "retries": {"mode": "standard", "total_max_attempts": 2},  # a part of an upload; the whole is ours to repeat
    }
    if endpoint and "amazonaws.com" not in endpoint:
        config["s3"] = {"addressing_style": "path"}  # bucket.host needs a DNS entry per bucket
    settings = {"skip_instance_cache": True, "use_listings_cache": False, "config_kwargs": config, **options}
    filesystem = s3fs.S3FileSystem(endpoint_url=endpoint, **settings)
    filesystem.retries = 1  # a third loop of retries would multiply the other two: minutes until an error is told
    return _FsspecBackend(filesystem)


BACKENDS: dict[str, Callable[[Mapping[str, Any]], Backend]] = {
    "file": _make_local,
    "memory": _make_memory,
    "s3": _make_s3,
}

_cache: dict[tuple[int, str, str], Backend] = {}
_cache_lock = threading.Lock()


def _new_locks() -> None:
    """Another thread of the parent may have held a lock in the instant of the fork."""
    global _cache_lock, _memory_lock
    _cache_lock, _memory_lock = threading.Lock(), threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_locks)


def backend_for(protocol: str, options: Mapping[str, Any]) -> Backend:
    """The process's backend for a protocol, options and the present environment.

    Connections are shared between stores, but never over a fork (s3fs is not fork-safe) and never between
    different credentials.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    identity = json.dumps([variables, dict(options)], sort_keys=True, default=repr)
    key = (os.getpid(), protocol, hashlib.sha256(identity.encode()).hexdigest())
    with _cache_lock:
        if key not in _cache:
            _cache[key] = BACKENDS[protocol](options)
        return _cache[key]
