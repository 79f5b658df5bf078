"""Why a process of a training ended, said where its parent finds it, also on a full disk.

A log cannot grow on a full disk, so the one thing that must be said would be lost. The parent therefore makes a note
whose room is taken beforehand, and names it in the child's environment; the child writes over it in place.
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
VARIABLE = "STARLING_LAST_WORDS"
"""Environment variable with the path of a process's note."""
ROOM = 4096
"""Bytes of a note: a block of most file systems."""


def reserve(note: Path) -> dict[str, str]:
    """Make an empty note.

    Args:
        note: Where; what it said is forgotten.

    Returns:
        The environment that names it to a child.
    """
    note.parent.mkdir(parents=True, exist_ok=True)
    # over what is there: a truncated file would have to find its room again
    with note.open("r+b" if note.exists() else "wb") as file:
        file.write(b"\n" * ROOM)
        file.truncate(ROOM)
    return {VARIABLE: str(note)}


def leave(text: str, note: Path | None = None) -> None:
    """Say why this process ends.

    Args:
        text: The reason.
        note: Where; by default what the environment names. The first reason stays.
    """
    place = note or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if place is None or read(place):
        return
    data = redact(text).encode()[: ROOM - 1]
    with suppress(OSError), place.open("r+b" if place.exists() else "wb") as file:
        file.write(data.ljust(ROOM, b"\n"))


def read(note: Path) -> str:
    """What a note says; empty if its process has said nothing."""
    try:
        return note.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def end_told(work: Callable[[], int], status: int) -> int:
    """Run a process's work; a full, read-only or forbidden disk ends it with last words instead of a traceback.

    Args:
        work: All of it; returns the exit status.
        status: Exit status after such an end: another try would not help.
    """
    named = os.environ.get(VARIABLE)
    try:
        with disk_named(*([Path(named).parent] if named else []), *system_folders()):
            return work()
    except DiskError as error:
        leave(str(error))
        log.error("%s", error)
        return status
