"""An LRU cache of remote shards in a local folder with a size limit, shared by processes and runs.

Copies are named `<sha256>.tar`, so all runs that need the same bytes share them. Concurrent requests for a shard wait
for a single download. Readers get an open descriptor, through which the copy was verified: an eviction only removes the
name, so it can cause a reader to fetch again, but never to fail. After a killed process, the system releases its locks
and the next download sweeps its files.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from configurable.files import publish_file
from storage.locks import passing_lock
from storage.publishing import sweep_temporary_files, temporary_file
from storage.retries import ObjectStoreError

DEFAULT_BYTES = 50 * 10**9  # 800 hours of LibriSpeech as FLAC
_LIMIT = ".limit.json"
_DOWNLOAD_WAIT_S = 3600.0  # for another process that downloads the same file
_TOUCH_S = 10.0  # between two marks that a file is in use: each is a write to the disk
_CLEARINGS = 5
"""How often in a row other processes may empty the folder during a download."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})

Fetch = Callable[[Path], object]
Check = Callable[[BufferedReader], str | None]


class DamagedCopyError(ValueError):
    """A fetched copy failed its check twice; the message says why."""


class CacheFullError(OSError):
    """The folder's disk has no room for a copy, even after evicting all others."""


def set_cache_limit(folder: Path, max_bytes: int) -> None:
    """Set the limit of a cache for all processes of this machine that do not specify one."""
    folder.mkdir(parents=True, exist_ok=True)
    if _noted_limit(folder) == max_bytes:
        return
    with temporary_file(folder) as (file, scratch):
        file.write(json.dumps({"max_bytes": max_bytes}).encode())
        publish_file(scratch, folder / _LIMIT)


def _noted_limit(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / _LIMIT).read_text(encoding="utf-8"))["max_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class ShardCache:
    """Copies of shards in one folder.

    Finished copies never exceed the limit in total, except for a single shard that is larger than the limit; running
    downloads are not counted.

    Args:
        folder: folder of the copies; created if missing.
        max_bytes: the limit; None uses the one stored by `set_cache_limit` in the folder, or else 50 GB.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(f"a cache limit of {max_bytes} bytes is not possible: use a positive one")
        self.folder = Path(folder)
        self._max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        """The limit in bytes."""
        return self._max_bytes or _noted_limit(self.folder) or DEFAULT_BYTES

    def open(self, digest: str, size: int, fetch: Fetch, check: Check) -> int:
        """Open the copy with this digest, fetching it if it is missing or damaged; the caller closes the descriptor.

        Args:
            digest: SHA-256 in hex, which names the copy.
            size: its size in bytes, for which to make room.
            fetch: writes the content to a file.
            check: returns what is wrong with a file, or None.

        Raises:
            DamagedCopyError: the fetched copy failed the check twice.
            CacheFullError: the disk has no room for it.
            LockTimeoutError: another process has been fetching it for an hour.
        """
        for clearing in range(_CLEARINGS):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                return self._find_or_fetch(digest, size, fetch, check)
            except FileNotFoundError as error:  # another process has just emptied the folder
                if isinstance(error, ObjectStoreError) or clearing + 1 == _CLEARINGS:
                    raise
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                raise CacheFullError(error.errno, f"no room for a copy of {size:,} bytes", str(self.folder)) from error
        raise AssertionError("unreachable: the loop returns or raises")

    def path(self, digest: str) -> Path:
        """Path of the copy with this digest, whether or not it exists."""
        return self.folder / f"{digest}.tar"

    def _find_or_fetch(self, digest: str, size: int, fetch: Fetch, check: Check) -> int:
        target = self.path(digest)
        if (descriptor := self._find(target, check)) is not None:
            return descriptor
        with passing_lock(self.folder / f".lock-{digest}", _DOWNLOAD_WAIT_S):
            if (descriptor := self._find(target, check)) is not None:  # the previous lock owner has fetched it
                return descriptor
            self.sweep()
            problem = ""
            for _ in range(2):  # a second attempt repairs transmission errors
                made = self._fetch_with_room(target, size, fetch, check)
                if isinstance(made, int):
                    return made
                problem = made
            raise DamagedCopyError(problem)

    def _find(self, target: Path, check: Check) -> int | None:
        """Open the copy if it exists and passes the check."""
        self.touch(target)
        try:
            opened = open_checked(target, check)
        except FileNotFoundError:
            return None
        return opened if isinstance(opened, int) else None

    def _fetch_with_room(self, target: Path, size: int, fetch: Fetch, check: Check) -> int | str:
        try:
            return self._fetch(target, size, fetch, check)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self.evict(room=self.max_bytes):
                raise
        return self._fetch(target, size, fetch, check)  # the disk is smaller than the limit: retry without the others

    def _fetch(self, target: Path, size: int, fetch: Fetch, check: Check) -> int | str:
        """Fetch and open a new copy; returns its descriptor, or what is wrong with it."""
        self.evict(room=size)
        with temporary_file(self.folder) as (_, scratch):
            fetch(scratch)
            made = open_checked(scratch, check)  # before others can see and evict it
            if isinstance(made, int):
                try:
                    publish_file(scratch, target)
                    self.evict(keep=target)
                except BaseException:
                    os.close(made)
                    raise
        return made

    def touch(self, path: Path) -> None:
        """Update the time of last use of a copy, at most every ten seconds."""
        with contextlib.suppress(OSError):  # it may have been evicted
            if time.time() - path.stat().st_mtime > _TOUCH_S:
                os.utime(path)

    def bytes(self) -> int:
        """Total size of all finished copies."""
        return sum(size for _, size, _ in self._copies())

    def _copies(self) -> list[tuple[float, int, Path]]:
        """Time of last use, size and path of each copy, least recently used first."""
        copies = []
        for path in self.folder.glob("*.tar"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                copies.append((status.st_mtime, status.st_size, path))
        return sorted(copies)

    def evict(self, room: int = 0, keep: Path | None = None) -> list[Path]:
        """Remove the least recently used copies until the others and `room` bytes fit into the limit.

        Args:
            room: bytes about to be added.
            keep: a copy not to remove.

        Returns:
            The removed copies.
        """
        removed: list[Path] = []
        with _folder_lock(self.folder):  # otherwise two processes would each remove enough
            copies = self._copies()
            total = sum(size for _, size, _ in copies) + room
            for _, size, path in copies:
                if total <= self.max_bytes:
                    break
                if path != keep:
                    path.unlink(missing_ok=True)
                    removed.append(path)
                    total -= size
        return removed

    def sweep(self, min_age_s: float = 60.0) -> None:
        """Remove files left by killed processes: unfinished downloads, and lock files that are not held."""
        sweep_temporary_files(self.folder, min_age_s)
        for path in self.folder.glob(".lock-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= min_age_s:
                    with passing_lock(path, wait_s=0.0):
                        pass


def open_checked(path: Path, check: Check) -> int | str:
    """Open a file and check it; returns its descriptor, or what is wrong with it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            problem = check(file)
    except BaseException:
        os.close(descriptor)
        raise
    if problem is None:
        return descriptor
    os.close(descriptor)
    return problem


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Lock the folder itself, so that no lock file remains in it; held only briefly."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
