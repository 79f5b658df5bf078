"""Temporary files of object stores and caches: errors name the disk, and files of killed processes are removed."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from configurable import files
from configurable.files import TEMP_PREFIX
from storage.disks import system_folders
from storage.retries import disk_named


@contextmanager
def temporary_file(folder: Path | None, subject: str = "") -> Iterator[tuple[BinaryIO, Path]]:
    """Create a temporary file as `configurable.files.temporary_file` does.

    Args:
        folder: The file's folder; None for the system's temporary folder.
        subject: The final name for error messages; by default the folder.

    Raises:
        DiskError: The disk is full or not writable.
    """
    place = folder or system_folders()[0]
    with disk_named(place, subject=subject or str(place)), files.temporary_file(place) as made:
        yield made


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
