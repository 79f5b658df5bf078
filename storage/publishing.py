"""Files of the local disk, published whole or not at all: written under a temporary name, synced, and renamed."""

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
    """An unbuffered file that takes all of what it is given, or raises: the system may take a part, as on a full disk.

    Callers such as shutil and pyarrow ignore what `write` returns.
    """

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write everything; returns how much that was."""
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            done += super().write(view[done:])
        return done


@contextmanager
def temporary_file(folder: Path | None, subject: str = "") -> Iterator[tuple[BinaryIO, Path]]:
    """An unbuffered file with a temporary name, removed at the end unless it has been renamed meanwhile.

    Args:
        folder: Where it is; None is the system's temporary folder.
        subject: What it will become, for errors; by default the folder is named.

    Raises:
        DiskError: The disk is full, or cannot be written.
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
        with suppress(OSError):  # some network disks know no locks; there nothing is swept either
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # shows that the writer lives; the system drops it with the process
        with _WholeFile(descriptor, "wb") as file:
            yield cast(BinaryIO, file), path
    finally:
        path.unlink(missing_ok=True)


def sweep_temporary_files(folder: Path, min_age_s: float = 60.0) -> None:
    """Removes the temporary files in a folder whose writer is dead, and leaves those of living writers.

    Files younger than `min_age_s` stay: their writer may be about to lock them.
    """
    for path in folder.glob(f"{TEMP_PREFIX}*"):
        with suppress(OSError):  # another process may sweep too, or the file may be locked
            if time.time() - path.stat().st_mtime < min_age_s:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def publish_file(source: Path, target: Path) -> None:
    """Renames a local file to its final place after its bytes have reached the disk; then syncs the rename."""
    _sync(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
    _sync(target.parent)


def _read_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# Read once, at import: asking for the umask changes it for an instant, which other threads would notice.
_UMASK = _read_umask()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
