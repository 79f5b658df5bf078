"""A folder of copies of remote shards: bounded, the least recently used leave first, shared by processes and runs.

A copy is `<sha256>.tar`, so every run that wants the same bytes finds them. Several that want a shard at once wait for
one download. A reader gets its copy open, checked through the same descriptor: an eviction takes away the
name only, so it can make a reader fetch again, but never fail. A killed process leaves nothing for long: the system
frees its locks, and the next one sweeps.
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

from storage.locks import passing_lock
from storage.publishing import publish_file, sweep_temporary_files, temporary_file
from storage.retries import ObjectStoreError

DEFAULT_BYTES = 50 * 10**9
_LIMIT = ".limit.json"
_DOWNLOAD_WAIT_S = 3600.0
_TOUCH_S = 10.0
_CLEARINGS = 5
"""How often in a row somebody else may empty the folder under a download."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})

Fetch = Callable[[Path], object]
Check = Callable[[BufferedReader], str | None]


class DamagedCopyError(ValueError):
    """What was fetched is not what was wanted, twice; the message says what is wrong with it."""


class CacheFullError(OSError):
    """The folder's disk has no room for a copy, even without all the others."""


def set_cache_limit(folder: Path, max_bytes: int) -> None:
    """Bounds a cache for all processes of this machine that name no limit themselves."""
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

    The finished copies together never hold more than the limit, except for a single shard that is larger than it; what
    is just being fetched comes on top.

    Args:
        folder: where the copies are; made if missing.
        max_bytes: the limit; None takes what `set_cache_limit` has noted in the folder, else 50 GB.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(f"a cache of {max_bytes} bytes can hold nothing: give it a positive limit")
        self.folder = Path(folder)
        self._max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        """The limit in bytes."""
        return self._max_bytes or _noted_limit(self.folder) or DEFAULT_BYTES

    def open(self, digest: str, size: int, fetch: Fetch, check: Check) -> int:
        """A descriptor of the copy with this digest, fetched if it is missing or damaged; the caller closes it.

        Args:
            digest: SHA-256 in hex: the copy's name.
            size: bytes that it will have, to make room for.
            fetch: writes the content over a file.
            check: says what is wrong with a file, or None.

        Raises:
            DamagedCopyError: what was fetched failed the check two times.
            CacheFullError: the disk has no room for it.
            LockTimeoutError: another process has been fetching it for an hour.
        """
        for clearing in range(_CLEARINGS):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                return self._find_or_fetch(digest, size, fetch, check)
            except FileNotFoundError as error:  # somebody has emptied the folder just now
                if isinstance(error, ObjectStoreError) or clearing + 1 == _CLEARINGS:
                    raise
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                raise CacheFullError(error.errno, f"no room for a copy of {size:,} bytes", str(self.folder)) from error
        raise AssertionError("unreachable: the loop returns or raises")

    def path(self, digest: str) -> Path:
        """Where the copy with this digest is or would be."""
        return self.folder / f"{digest}.tar"

    def _find_or_fetch(self, digest: str, size: int, fetch: Fetch, check: Check) -> int:
        target = self.path(digest)
        if (found := self._find(target, check)) is not None:
            return found
        with passing_lock(self.folder / f".lock-{digest}", _DOWNLOAD_WAIT_S):
            if (found := self._find(target, check)) is not None:  # the last holder of the lock has fetched it
                return found
            self.sweep()
            problem = ""
            for _ in range(2):  # bits that flipped on the way are right the second time
                made = self._fetch_with_room(target, size, fetch, check)
                if isinstance(made, int):
                    return made
                problem = made
            raise DamagedCopyError(problem)

    def _find(self, target: Path, check: Check) -> int | None:
        """The copy, open, if it is there and passes the check."""
        self.touch(target)
        try:
            found = open_checked(target, check)
        except FileNotFoundError:
            return None
        return found if isinstance(found, int) else None

    def _fetch_with_room(self, target: Path, size: int, fetch: Fetch, check: Check) -> int | str:
        try:
            return self._fetch(target, size, fetch, check)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self.evict(room=self.max_bytes):
                raise
        return self._fetch(target, size, fetch, check)  # the disk is smaller than the limit: the others made room

    def _fetch(self, target: Path, size: int, fetch: Fetch, check: Check) -> int | str:
        """The new copy, open, or what is wrong with it."""
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
        """Notes that a copy is in use; costs a system call at most every ten seconds."""
        with contextlib.suppress(OSError):  # it may just have been evicted
            if time.time() - path.stat().st_mtime > _TOUCH_S:
                os.utime(path)

    def bytes(self) -> int:
        """Bytes of all finished copies."""
        return sum(size for _, size, _ in self._copies())

    def _copies(self) -> list[tuple[float, int, Path]]:
        """Time of last use, size and path of each copy, least recently used first."""
        found = []
        for path in self.folder.glob("*.tar"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def evict(self, room: int = 0, keep: Path | None = None) -> list[Path]:
        """Removes the least recently used copies until the rest and `room` bytes fit into the limit.

        Args:
            room: bytes that are about to be added.
            keep: a copy that stays.

        Returns:
            What was removed.
        """
        removed: list[Path] = []
        with _folder_lock(self.folder):  # or two processes would both remove enough
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
        """Removes what killed processes have left: unfinished downloads, and files of locks that are not held."""
        sweep_temporary_files(self.folder, min_age_s)
        for path in self.folder.glob(".lock-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= min_age_s:
                    with passing_lock(path, wait_s=0.0):
                        pass


def open_checked(path: Path, check: Check) -> int | str:
    """A descriptor of a file that passes a check, or what is wrong with it."""
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
    """Holds the folder itself, so that no lock file is left lying in it; held for the time of a listing only."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
