"""Random access to the payloads of shards, with verification of every shard.

When a process uses a shard for the first time, the shard is copied to the local disk if it is remote, and its size and
SHA-256 are compared with the index: truncated or damaged WebDataset tars lose samples silently. A mismatch raises a
`ShardError` with the shard's record, so that the caller can quarantine the shard (`storage.quarantine`) and continue
with the others.
"""

import hashlib
import logging
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from shutil import rmtree
from typing import Any

from storage.cache import CacheFullError, DamagedCopyError, ShardCache, open_checked
from storage.index import ShardIndex, ShardRecord
from storage.intact import object_sha256, remedy
from storage.objects import ObjectMissingError, ObjectStore, ObjectStoreError
from storage.safety import UnsafeTarError, check_tar
from storage.union import shards_store

_LOG = logging.getLogger(__name__)
_ANOTHER = "its SHA-256 differs from the index: it is damaged or was replaced"
_FULL_S = 60.0
"""How long a reader bypasses its cache after the cache was full."""


class ShardError(ValueError):
    """A shard is missing, damaged, or does not match the index.

    Attributes:
        shard: its record in the index.
        reason: what is wrong, in a few words.
    """

    def __init__(self, message: str, shard: ShardRecord | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.shard = shard
        self.reason = reason or message

    @property
    def damage(self) -> tuple[str, str]:
        """Name of the damaged shard, and what is wrong with it."""
        assert self.shard is not None
        return self.shard.name, self.reason


class ShardReader:
    """Random access to the payloads of a set of shards.

    Thread-safe. May be pickled; each process verifies shards itself.

    Args:
        store: the store of the index and the shards; for a union, the shards are in sibling folders.
        index: the index of the shards.
        cache_dir: folder for copies of remote shards, as `<sha256>.tar`; processes and runs may share it. None uses a
            temporary folder, removed with the reader.
        cache_bytes: maximum size of the copies; None uses the folder's own limit (see `ShardCache`).
    """

    def __init__(
        self, store: ObjectStore, index: ShardIndex, cache_dir: Path | None = None, cache_bytes: int | None = None
    ) -> None:
        self.store = shards_store(store, index)
        self.index = index
        self.cache_dir = Path(cache_dir) if cache_dir is not None else None
        self.cache_bytes = cache_bytes
        self._prepare()

    def _prepare(self) -> None:
        self._paths: dict[int, Path] = {}
        self._stamps: dict[int, tuple[int, int, int]] = {}
        """Stamps of local shards when they were verified; not of copies, whose times change with their use."""
        self._used: dict[int, float] = {}
        self._through: set[int] = set()
        """Shards verified in the store, because the cache had no room for a copy."""
        self._full_until = 0.0
        self._locks = [threading.Lock() for _ in self.index.shards]
        self._lock = threading.Lock()
        self._cache: ShardCache | None = None
        self._wanted: deque[int] = deque()
        self._prefetcher: threading.Thread | None = None
        self._shard_of = self.index.column("shard")
        self._offset_of = self.index.column("offset")
        self._length_of = self.index.column("length")

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("store", "index", "cache_dir", "cache_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __len__(self) -> int:
        return len(self.index)

    def payload(self, position: int) -> bytes:
        """Read the payload of the utterance in a row of the index.

        A copy that was evicted from the cache or truncated since its last use is fetched again; a local shard whose
        file has changed is verified again. If the cache's disk is full, the payload is read from the store.

        Raises:
            IndexError: the row does not exist.
            ShardError: its shard is missing or damaged; `error.shard` is its record. Rows of other shards remain
                readable, and a later call tries this shard again.
            ObjectStoreError: the store cannot be reached; this does not mean that the shard is damaged.
        """
        if not 0 <= position < len(self.index):
            raise IndexError(f"row {position} of an index of {len(self.index)} utterances")
        shard, length = int(self._shard_of[position]), int(self._length_of[position])
        for _ in range(2):
            data = self._read(shard, int(self._offset_of[position]), length)
            if len(data) == length:
                return data
            self._forget(shard)
        raise self._error(self.index.shards[shard], "it was truncated while it was in use")

    def _read(self, shard: int, offset: int, length: int) -> bytes:
        descriptor = self._open(shard)
        if descriptor is None:
            return self._read_through(shard, offset, length)
        try:
            return _pread(descriptor, length, offset)
        finally:
            os.close(descriptor)

    def _forget(self, shard: int) -> None:
        """Mark a shard for verification before its next use."""
        self._paths.pop(shard, None)
        self._through.discard(shard)

    def recheck(self, position: int) -> None:
        """Verify the shard of an undecodable payload again; a damaged copy is fetched again.

        Raises:
            ShardError: the shard is damaged.
        """
        shard = int(self._shard_of[position])
        self._forget(shard)
        self._ensure(shard)

    def undecodable(self, position: int, error: Exception) -> ShardError:
        """Create the error for an undecodable payload in an intact shard."""
        record = self.index.shards[int(self._shard_of[position])]
        reason = f"utterance {self.index.row(position)['id']!r} cannot be decoded ({type(error).__name__}: {error})"
        text = f"{self._label(record)}: {reason}, although the shard is undamaged"
        return ShardError(f"{text}. Run the pipeline again with --from shard.", record, reason)

    def _ensure(self, shard: int) -> None:
        """Fetch and verify a shard unless that is already done."""
        descriptor = self._open(shard)
        if descriptor is not None:
            os.close(descriptor)

    def shard_path(self, shard: int) -> Path:
        """The local, verified file of a shard (index in `index.shards`); open it soon, as copies may be evicted.

        Raises:
            ShardError: it is missing, damaged, unsafe, or does not match the index.
        """
        if not 0 <= shard < len(self._locks):
            raise IndexError(f"shard {shard} of an index of {len(self._locks)} shards")
        self._ensure(shard)
        return self._paths[shard]

    def _open(self, shard: int) -> int | None:
        """Open a verified shard; the descriptor survives an eviction. None if the shard must be read from the store."""
        # Opening takes microseconds; keeping descriptors open would conflict with forks, threads and 10,000 shards.
        for _ in range(5):
            descriptor = self._open_known(shard)
            if descriptor is None:
                with self._locks[shard]:  # other threads wait for the first user of this shard only
                    descriptor = self._open_known(shard)
                    if descriptor is None and not self._reads_through(shard):
                        descriptor = self._obtain(shard)
            if descriptor is None:
                return None
            stamp = self._stamps.get(shard)
            if stamp is None or stamp == _stamp(os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)
            self._paths.pop(shard, None)
        raise ObjectStoreError(
            f"{self._label(self.index.shards[shard])}: it keeps changing while it is read: stop the program that "
            "writes it"
        )

    def _reads_through(self, shard: int) -> bool:
        """Whether a shard is read from the store for now."""
        return shard in self._through and time.monotonic() < self._full_until

    def _open_known(self, shard: int) -> int | None:
        """Open a shard that was verified before, if its file still exists."""
        path = self._paths.get(shard)
        if path is None:
            return None
        if self._cache is not None and time.monotonic() - self._used.get(shard, 0.0) > 10.0:
            self._used[shard] = time.monotonic()
            self._cache.touch(path)
        try:
            return os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            self._paths.pop(shard, None)
            return None

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch and verify shards in the background, in this order, for example those of the next lease.

        Returns immediately; replaces the pending shards of an earlier call. Errors are ignored here and raised when the
        shard is read. At most half of the cache is filled with remote shards, so that shards in use are not evicted.
        """
        records, wanted = self.index.shards, []
        room = self._shard_cache().max_bytes // 2 if self.store.local_path("x") is None else 1 << 62
        for shard in shards:
            if not 0 <= shard < len(records):
                raise IndexError(f"shard {shard} of an index of {len(records)} shards")
            room -= records[shard].bytes
            if room >= 0:
                wanted.append(shard)
        with self._lock:
            self._wanted = deque(wanted)
            if self._wanted and (self._prefetcher is None or not self._prefetcher.is_alive()):
                self._prefetcher = threading.Thread(target=self._fetch_wanted, name="prefetch", daemon=True)
                self._prefetcher.start()

    def _fetch_wanted(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._prefetcher = None
                    return
                shard = self._wanted.popleft()
            try:
                self._ensure(shard)
            except (ShardError, OSError):
                continue  # the reader that needs the shard gets the error

    def _obtain(self, shard: int) -> int | None:
        record = self.index.shards[shard]
        path = self.store.local_path(record.name)
        if path is None:
            return self._obtain_copy(shard, record)
        stamps = []

        def check(file: BufferedReader) -> str | None:
            stamps.append(_stamp(os.fstat(file.fileno())))  # before reading, so that a change is noticed later
            return _problem(file, record)

        try:
            opened = open_checked(path, check)
        except FileNotFoundError as error:
            raise self._error(record, "it is missing") from error
        if isinstance(opened, str):
            raise self._error(record, opened)
        self._stamps[shard], self._paths[shard] = stamps[0], path
        return opened

    def _obtain_copy(self, shard: int, record: ShardRecord) -> int | None:
        if time.monotonic() < self._full_until:
            self._verify_through(shard, record)
            return None

        def fetch(target: Path) -> None:
            self.store.fetch_into(record.name, target)

        cache = self._shard_cache()
        try:
            opened = cache.open(record.sha256, record.bytes, fetch, lambda file: _problem(file, record))
        except ObjectMissingError as error:
            raise self._error(record, "it is missing") from error
        except DamagedCopyError as error:
            raise self._error(record, str(error)) from error
        except CacheFullError as error:
            if not self._full_until:
                _LOG.warning("%s. Shards are read in %s instead, which is slow.", error, self.store.url)
            self._full_until = time.monotonic() + _FULL_S
            self._verify_through(shard, record)
            return None
        self._through.discard(shard)
        self._paths[shard] = cache.path(record.sha256)
        return opened

    def _verify_through(self, shard: int, record: ShardRecord) -> None:
        """Compare a shard with the index without making a copy, unless that is already done."""
        if shard in self._through:
            return
        try:
            digest = object_sha256(self.store, record.name, self.store.size(record.name))
        except ObjectMissingError as error:
            raise self._error(record, "it is missing") from error
        if digest != record.sha256:
            raise self._error(record, _ANOTHER)
        self._through.add(shard)

    def _read_through(self, shard: int, offset: int, length: int) -> bytes:
        record = self.index.shards[shard]
        try:
            return self.store.read(record.name, offset, offset + length)
        except ObjectMissingError as error:
            raise self._error(record, "it is missing") from error

    def _shard_cache(self) -> ShardCache:
        with self._lock:
            if self._cache is None:
                folder = self.cache_dir
                if folder is None:
                    folder = Path(tempfile.mkdtemp(prefix="starling-shards-"))
                    weakref.finalize(self, rmtree, folder, ignore_errors=True)
                self._cache = ShardCache(folder, self.cache_bytes)
            return self._cache

    def _error(self, record: ShardRecord, problem: str) -> ShardError:
        text = f"{self._label(record)}: {problem}. {remedy(self.store.join(record.name))}."
        return ShardError(text, record, problem)

    def _label(self, record: ShardRecord) -> str:
        return f"shard {self.store.join(record.name)}"


def _pread(descriptor: int, length: int, offset: int) -> bytes:
    pieces: list[bytes] = []
    while length > 0:
        piece = os.pread(descriptor, length, offset)
        if not piece:
            break
        pieces.append(piece)
        length -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _problem(file: BufferedReader, record: ShardRecord) -> str | None:
    """What is wrong with a shard's file, or None."""
    size = file.seek(0, os.SEEK_END)
    if size != record.bytes:
        return f"it has {size} bytes instead of {record.bytes}"
    file.seek(0)
    if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
        return _ANOTHER
    try:
        check_tar(file, record.name)
    except UnsafeTarError as error:
        return str(error)
    return None
