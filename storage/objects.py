"""Object stores: one small interface over a local folder, memory, S3-compatible servers, Google and Azure storage.

    store = ObjectStore("s3://speech/runs")
    store.child("shards").write_json("parts/000.json", {"count": 12})

Writes are atomic on every kind of store: readers never see a partial object. Transient failures are retried with
exponential backoff; permanent ones raise an `ObjectStoreError` that names the URL and the remedy. Endpoint and
credentials come from the environment only (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, ...;
`GOOGLE_APPLICATION_CREDENTIALS`; `AZURE_STORAGE_CONNECTION_STRING`, ...), so that no URL, repr or message can reveal
them.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from configurable.files import TEMP_PREFIX, publish_file
from storage.backends import BACKENDS, Backend, Entry, backend_for
from storage.intact import parse_json
from storage.publishing import temporary_file
from storage.retries import ObjectMissingError, ObjectStoreError, RetryPolicy, disk_named, with_retries

__all__ = [
    "Entry",
    "ObjectMissingError",
    "ObjectNameError",
    "ObjectStore",
    "ObjectStoreError",
    "RetryPolicy",
    "check_name",
]

T = TypeVar("T")

_SECRET_OPTIONS = frozenset(
    [
        "key",
        "secret",
        "token",
        "username",
        "password",
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "endpoint_url",
        "client_kwargs",
        "session",
        "profile",
    ]
)


class ObjectNameError(ValueError):
    """An invalid object name or storage URL."""


def check_name(name: str) -> str:
    """Return an object's name if it is valid on every store.

    Raises:
        ObjectNameError: it is empty or absolute, contains an empty part, ".", "..", a backslash or a control character,
            or a part that starts like a temporary file.
    """
    if not isinstance(name, str) or not name:
        raise ObjectNameError(
            f"an object name is empty or not a string ({name!r}): use a relative name like 'a/b.json'"
        )
    if name.startswith("/"):
        raise ObjectNameError(f"object name {name!r} is absolute: remove the leading slash")
    if "\\" in name or any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise ObjectNameError(f"object name {name!r} has a backslash or a control character: remove it")
    for part in name.split("/"):
        if part in {"", ".", ".."} or part.startswith(TEMP_PREFIX):
            raise ObjectNameError(f"object name {name!r} has the part {part!r}, which is not allowed: rename it")
    return name


class ObjectStore:
    """Objects under one URL: `file:///folder` or a plain path, `memory://name`, `s3://bucket/prefix`, `gs://`, `az://`.

    Stores are cheap to create, safe to share between threads, and may be pickled or inherited by a fork: every process
    opens its own connections. `memory://` is shared by all stores of a process and is lost when it ends.

    Args:
        url: URL of the objects; relative paths become absolute.
        retry: retries of transient failures.
        **options: passed to the fsspec file system; credentials and endpoints are rejected.

    Raises:
        ObjectNameError: the URL is malformed, has an unknown scheme or one whose package is not installed, or contains
            credentials.
    """

    def __init__(self, url: str | os.PathLike[str], *, retry: RetryPolicy | None = None, **options: object) -> None:
        forbidden = sorted(_SECRET_OPTIONS & options.keys())
        if forbidden:
            raise ObjectNameError(
                f"option {forbidden[0]!r} is not accepted: set the environment variables, such as AWS_..."
            )
        self.protocol, self._path = _split_url(os.fspath(url))
        self.url = self._url_of(self._path)
        self._retry = retry or RetryPolicy(attempts=2 if BACKENDS[self.protocol].patient else RetryPolicy.attempts)
        self._options = options

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStore) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def join(self, name: str) -> str:
        """The URL of an object of this store."""
        return f"{self.url.rstrip('/')}/{check_name(name)}"

    def child(self, prefix: str) -> "ObjectStore":
        """The store of everything below `prefix`."""
        return ObjectStore(self.join(prefix.rstrip("/")), retry=self._retry, **self._options)

    def parent(self) -> "ObjectStore":
        """The store of the parent folder.

        Raises:
            ObjectNameError: this store is a whole bucket or disk.
        """
        folder = self._path.rpartition("/")[0]
        if not folder:
            raise ObjectNameError(f"{self.url} has no folder above it")
        return ObjectStore(self._url_of(folder), retry=self._retry, **self._options)

    def exists(self, name: str) -> bool:
        """Whether the object exists (a folder or a bare prefix does not)."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """Size of the object in bytes."""
        return self._call(name, lambda backend, path: backend.size(path))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Read the object's bytes from `start` to `end` (exclusive); ranges are truncated at the end, as for a file."""
        first = start or 0
        if first < 0 or (end is not None and end < first):
            raise ValueError(f"{self.join(name)}: the byte range {start}..{end} is not ascending from 0")
        return self._call(name, lambda backend, path: backend.read(path, first, end))

    def write(self, name: str, data: bytes) -> None:
        """Write or replace the object atomically: readers see either the old or the new content.

        On S3 this is as atomic as the server's put. Amazon's is atomic; rclone's may hide an object for an instant
        while several writers replace it concurrently, so objects that change should have a single writer.
        """
        self._call(name, lambda backend, path: backend.put(path, data))

    def write_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Write the content of a local file; on local disks and S3, without loading all of it into memory."""
        source = Path(local_path)
        if not source.is_file():
            raise ObjectMissingError(f"{source}: no such file, so it cannot become {self.join(name)}. Check the path.")
        self._call(name, lambda backend, path: backend.put_file(path, source, False))

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Yield a local file to write to; it becomes the object if the block ends without an exception."""
        check_name(name)
        folder = self._call(name, lambda backend, path: backend.scratch(path))
        with temporary_file(folder, self.join(name)) as (file, scratch):
            yield file
            self._call(name, lambda backend, path: backend.put_file(path, scratch, True))

    def read_json(self, name: str) -> Any:
        """Read the value of a JSON object.

        Raises:
            DamagedObjectError: the object is not JSON.
        """
        return parse_json(self.join(name), self.read(name))

    def write_json(self, name: str, value: object) -> None:
        """Write a value as JSON (UTF-8, sorted keys, final newline)."""
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=1)
        self.write(name, f"{text}\n".encode())

    def entries(self, prefix: str = "") -> list[Entry]:
        """All objects below the folder `prefix`, by name (relative to this store); times are by the store's clock."""
        folder = prefix.rstrip("/")
        base = self._path.rstrip("/") + "/"

        def below(backend: Backend, path: str) -> list[Entry]:
            everything = (e for e in backend.walk(path) if e.path.startswith(base))
            return sorted(e._replace(path=e.path.removeprefix(base)) for e in everything)

        return self._call(folder, below, root=True)

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names, relative to this store, of all objects below the folder `prefix`."""
        return [entry.path for entry in self.entries(prefix)]

    def delete(self, name: str) -> None:
        """Delete an object; does nothing if it does not exist."""
        self._call(name, lambda backend, path: backend.delete(path))

    def delete_tree(self, prefix: str) -> None:
        """Delete everything below `prefix`; "" empties the store."""
        folder = prefix.rstrip("/")
        if not folder and self._path.count("/") < 2 and self.protocol == "file":
            raise ObjectNameError(f"{self.url} is too close to the root to be emptied: name a prefix")
        self._call(folder, lambda backend, path: backend.delete_tree(path), root=True)

    def sweep(self) -> None:
        """Remove temporary files that killed writers left in a local store; files of live writers are kept."""
        self._call("", lambda backend, path: backend.sweep(path), root=True)

    def local_path(self, name: str) -> Path | None:
        """The object's path on this machine's disk, or None if the store is not a local folder."""
        check_name(name)
        return Path(self._full_path(name)) if self.protocol == "file" else None

    def fetch(self, name: str, folder: Path) -> Path:
        """A local file with the object's content: the object itself, or a copy `folder/name`, written atomically."""
        local = self.local_path(name)
        if local is not None:
            self.size(name)
            return local
        target = Path(folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(target.parent) as (_, scratch):
            publish_file(self.fetch_into(name, scratch), target)
        return target

    def fetch_into(self, name: str, target: Path) -> Path:
        """Overwrite a local file with the object's content; not atomic, so no other process may use the file yet."""

        def copy(backend: Backend, path: str) -> None:
            with disk_named(target.parent):  # errors of the local disk, not of the object's store
                backend.get_file(path, target)

        self._call(name, copy)
        return target

    def _full_path(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}" if name else self._path

    def _call(self, name: str, action: Callable[[Backend, str], T], root: bool = False) -> T:
        if name or not root:
            check_name(name)
        path = self._full_path(name)
        return with_retries(
            lambda: action(backend_for(self.protocol, self._options), path), self._url_of(path), self._retry
        )

    def _url_of(self, path: str) -> str:
        return f"{self.protocol}://{path if self.protocol == 'file' else path.lstrip('/')}"


def _split_url(url: str) -> tuple[str, str]:
    """Scheme and path of a URL: an absolute path for files, "/name" for memory, "bucket/prefix" for the others."""
    protocol, separator, path = url.partition("://")
    if not separator:
        protocol, path = "file", url
    if protocol not in BACKENDS:
        known = ", ".join(f"{name}://" for name in sorted(BACKENDS))
        raise ObjectNameError(f"unknown scheme {protocol!r} in a storage URL: use a path or one of {known}")
    if missing := BACKENDS[protocol].missing:
        raise ObjectNameError(f"{protocol}:// {missing}")
    if not path:
        raise ObjectNameError(f"the storage URL {url!r} names no folder or bucket: add one")
    if protocol == "file":
        return protocol, os.path.normpath(Path(path).expanduser().absolute())
    if "@" in path.split("/")[0]:
        raise ObjectNameError(
            f"a {protocol}:// URL contains credentials: remove them and set the environment variables, such as AWS_..."
        )
    check_name(path.strip("/"))
    return protocol, ("/" if protocol == "memory" else "") + path.strip("/")
