"""Exit reasons: a note in which a process leaves why it ended, writable even on a full disk, read by its parent.

A log cannot grow on a full disk, so the reason would be lost. The parent therefore creates a file of fixed size and
passes its path in the child's environment; the child overwrites the file in place.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from storage.disks import system_folders
from storage.retries import DiskError, disk_named
from training.processes.logs import redact

log = logging.getLogger(__name__)
VARIABLE = "STARLING_EXIT_REASON"
"""Environment variable with the path of a process's note."""
CANNOT_WORK = 2
"""Exit status of a server that would fail again if restarted with the same configuration."""
ROOM = 4096
"""Size of a note in bytes: a block of most file systems."""


def reserve_note(note: Path) -> dict[str, str]:
    """Create an empty note of full size.

    Args:
        note: Path of the note; an earlier reason is erased.

    Returns:
        Environment variables that pass the path to a child.
    """
    note.parent.mkdir(parents=True, exist_ok=True)
    # overwrite an existing file: once truncated, it would have to allocate its blocks again
    with note.open("r+b" if note.exists() else "wb") as file:
        file.write(b"\n" * ROOM)
        file.truncate(ROOM)
    return {VARIABLE: str(note)}


def leave_reason(text: str, note: Path | None = None) -> None:
    """Write why this process ends; the first reason stays.

    Args:
        text: The reason.
        note: Path of the note; by default the one in the environment.
    """
    place = note or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if place is None or read_reason(place):
        return
    data = redact(text).encode()[: ROOM - 1]
    with suppress(OSError), place.open("r+b" if place.exists() else "wb") as file:
        file.write(data.ljust(ROOM, b"\n"))


def read_reason(note: Path) -> str:
    """The reason in a note; empty if the process left none."""
    try:
        return note.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def run_with_reason(work: Callable[[], int], status: int) -> int:
    """Run a process's work; a full, read-only or inaccessible disk ends it with a reason instead of a traceback.

    Args:
        work: The process's work; returns the exit status.
        status: Exit status after a disk error, for which a retry would not help.
    """
    named = os.environ.get(VARIABLE)
    try:
        with disk_named(*([Path(named).parent] if named else []), *system_folders()):
            return work()
    except DiskError as error:
        leave_reason(str(error))
        log.error("%s", error)
        return status
