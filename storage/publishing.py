"""Atomic publication of local files: written under a temporary name, synced, and renamed."""

import fcntl
import io
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from storage.disks import system_folders
from storage.retries import disk_named

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

TEMP_PREFIX = ".tmp-"


class _WholeFile(io.FileIO):
    """An unbuffered file that writes all data or raises; the system may write only a part, for example on a full disk.

    Callers such as shutil and pyarrow ignore the result of `write`. Errors have an attribute `needed_bytes`: the size
    of the data that were to be written.
    """

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all data; returns the number of bytes."""
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            error.needed_bytes = len(view)  # type: ignore[attr-defined]
            raise
        return done


@contextmanager
def temporary_file(folder: Path | None, subject: str = "") -> Iterator[tuple[BinaryIO, Path]]:
    """Create an unbuffered file with a temporary name; removes it at the end unless it was renamed.

    Args:
        folder: The file's folder; None for the system's temporary folder.
        subject: The final name for error messages; by default the folder.

    Raises:
        DiskError: The disk is full or not writable.
    """
    place = folder or system_folders()[0]
    with disk_named(place, subject=subject or str(place)), _temporary_file(place) as made:
        yield made


@contextmanager
def _temporary_file(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    descriptor, name = tempfile.mkstemp(prefix=TEMP_PREFIX, dir=folder)
    path = Path(name)
    try:
        os.fchmod(descriptor, 0o666 & ~_UMASK)  # mkstemp makes private files; published ones follow the umask
        with suppress(OSError):  # some network disks do not support locks; temporary files are not swept there either
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # shows that the writer is alive; ends with the process
        with _WholeFile(descriptor, "wb") as file:
            yield cast(BinaryIO, file), path
    finally:
        path.unlink(missing_ok=True)


def sweep_temporary_files(folder: Path, min_age_s: float = 60.0) -> None:
    """Remove temporary files of dead writers from a folder.

    Files younger than `min_age_s` are kept: their writers may not have locked them yet.
    """
    for path in folder.glob(f"{TEMP_PREFIX}*"):
        with suppress(OSError):  # another process may have removed the file, or its writer holds the lock
            if time.time() - path.stat().st_mtime < min_age_s:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def publish_file(source: Path, target: Path) -> None:
    """Sync a local file, rename it to its final path, and sync the rename."""
    _sync(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
    _sync(target.parent)


def _read_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# Read once, at import: reading the umask changes it for an instant, which would affect other threads.
_UMASK = _read_umask()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
