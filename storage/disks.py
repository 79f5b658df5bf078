"""Detects errors of full, read-only and forbidden disks, and explains them in one line with a remedy.

The system only says "No space left on device", without the folder or a remedy. Libraries have their own messages, such
as SQLite's "database or disk is full".
"""

import errno
import io
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

_FULL, _QUOTA = errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_NUMBERS = (_FULL, _QUOTA, errno.EROFS, *_FORBIDDEN)
_WORDS = {
    "no space left on device": _FULL,
    "os error 28": _FULL,  # safetensors, whose errors have no errno
    "database or disk is full": _FULL,
    "pytorchstreamwriter failed writing": _FULL,
    "error while creating shared memory segment": _FULL,  # NCCL
    "disk quota exceeded": _QUOTA,
    "read-only file system": errno.EROFS,
    "attempt to write a readonly database": errno.EROFS,
}
_SHORT_WRITE = re.compile(r"(\d+) requested and (\d+) written")  # numpy, whose error has no errno
_AMBIGUOUS = ("disk i/o error", "unable to open database file", "no usable temporary directory")
"""Messages of SQLite and Python that may mean a full or read-only disk, or something else."""
_LITTLE = 1 << 20
"""A disk with fewer free bytes counts as full."""
REMEDY = (
    "{first}, or name another folder (STARLING_HOME for all data, storage.url for the objects, TMPDIR for temporary "
    "files). Then run the same command again: finished work is kept."
)


def disk_trouble(error: BaseException | None, folders: Iterable[Path] = ()) -> int:
    """The errno of a full, read-only or forbidden disk in an exception or its causes; 0 for other errors.

    Args:
        error: The exception.
        folders: Folders where it may have happened; their disks are checked if the message is ambiguous.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if number := _number_of(error, folders):
            return number
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return 0


def _number_of(error: BaseException, folders: Iterable[Path]) -> int:
    if isinstance(error, OSError) and error.errno is not None and error.errno in _NUMBERS:
        # permission errors without a file concern ports or processes
        return error.errno if error.filename is not None or error.errno not in _FORBIDDEN else 0
    text = str(error).lower()
    if isinstance(error, OSError) and _SHORT_WRITE.fullmatch(text):
        return _FULL
    for words, number in _WORDS.items():
        if words in text:
            return number
    if any(words in text for words in _AMBIGUOUS):
        return next((number for folder in folders if (number := disk_state(folder))), 0)
    return 0


def disk_state(folder: Path) -> int:
    """The errno that describes the state of a folder's disk; 0 if it is writable and not full."""
    place = standing(folder)
    status = os.statvfs(place)
    if status.f_flag & os.ST_RDONLY:
        return errno.EROFS
    if not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        return errno.EACCES
    return _FULL if min(status.f_bavail * status.f_frsize, _LITTLE) < _LITTLE else 0


def system_folders() -> tuple[Path, ...]:
    """Folders where libraries write by default: the temporary folder, and shared memory if it is a file system."""
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError:  # Python tests candidates by writing to them
        temporary = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - only named in an error
    shared_memory = Path("/dev/shm")  # noqa: S108 - only read
    return (temporary, shared_memory) if shared_memory.is_dir() else (temporary,)


def standing(path: Path) -> Path:
    """The path itself, or its nearest existing parent folder."""
    path = Path(path).absolute()
    while not os.path.exists(path) and path != path.parent:  # noqa: PTH110 - Path.exists raises without permission
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the disk of a path, which need not exist."""
    status = os.statvfs(standing(path))
    return status.f_bavail * status.f_frsize


def size_text(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def room_text(path: Path) -> str:
    """Describe the free space on the disk of a path."""
    status = os.statvfs(standing(path))
    text = f"{size_text(status.f_bavail * status.f_frsize)} of {size_text(status.f_blocks * status.f_frsize)} free"
    if status.f_files and not status.f_favail:
        text += ", but no inodes"
    return text


def explain_disk(number: int, error: BaseException, places: Iterable[Path], subject: str = "") -> str:
    """Explain a disk error in one line: what could not be written, the folder, the free space, and the remedy.

    Args:
        number: The errno from `disk_trouble`.
        error: The exception.
        places: Folders that are written to, the most likely first.
        subject: What could not be written; by default the file of the exception, if known.
    """
    file = None if subject else named_file(error)
    folder = (file if file.is_dir() else file.parent) if file else _suspect(number, list(places))
    subject = subject or str(file or folder)
    of = "its disk" if subject == str(folder) else f"the disk of {folder}"
    if number in _FORBIDDEN:
        who = f"user {os.geteuid()}" if hasattr(os, "geteuid") else "this user"
        first = f"Change the owner or the mode of {folder}"
        return f"{subject}: permission denied, {who} may not use {folder}. {REMEDY.format(first=first)}"
    if number == errno.EROFS:
        return f"{subject}: {of} is read-only. {REMEDY.format(first='Mount it for writing')}"
    why = f"no space is left on {of}" if number == _FULL else f"the user's quota on {of} is used up"
    if needed := needed_bytes(error):
        why += f" for {size_text(needed)}"
    if not isinstance(error, OSError) or error.errno is None:  # a library's message may contain details
        why += f', "{_telling_line(str(error))}"' if str(error) else ""
    first = "Free some space there (`starling storage gc` shows what can go)"
    return f"{subject}: {why} ({room_text(folder)}). {REMEDY.format(first=first)}"


def _telling_line(text: str) -> str:
    """The line of a library's message that says what a disk lacks; MLflow and SQLAlchemy put advice before it."""
    lines = text.splitlines()
    return next((line for line in lines if any(words in line.lower() for words in (*_WORDS, *_AMBIGUOUS))), lines[0])


def needed_bytes(error: BaseException | None) -> int:
    """What could not be written, as an exception or one of its causes says in an attribute of this name; 0 if none."""
    while error is not None:
        if needed := getattr(error, "needed_bytes", 0):
            return int(needed)
        error = error.__cause__
    return 0


def _suspect(number: int, places: list[Path]) -> Path:
    """The folder whose disk is in that state, or the one with the least free space."""
    for place in [*places, *_standard_streams()]:
        if disk_state(place) == number:
            return place
    return min(places, key=free_bytes) if places else Path.cwd()


def _standard_streams() -> Iterator[Path]:
    """Yield the files that standard output and error are redirected to; on Linux."""
    for stream in (1, 2):
        path = Path(f"/proc/self/fd/{stream}")
        if path.is_file():
            yield path.resolve()


def named_file(error: BaseException) -> Path | None:
    """The file of an exception or one of its causes, if known.

    Errors of `write` name no file; for these, it is a file that the innermost function of the traceback has open.
    """
    seen: set[int] = set()
    files: list[Path] = []
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        name = getattr(current, "filename2", None) or getattr(current, "filename", None)  # of a copy, its target
        if isinstance(current, OSError) and isinstance(name, str | os.PathLike) and os.fspath(name):
            return Path(os.fsdecode(name))
        if isinstance(current, OSError):
            files += _open_files(current)
        current = current.__cause__ or current.__context__
    return files[0] if files else None


def _open_files(error: BaseException) -> Iterator[Path]:
    """Yield files that functions of the traceback, or their objects, have open for writing, innermost first."""
    frames: list[FrameType] = []
    step = error.__traceback__
    while step is not None:
        frames.insert(0, step.tb_frame)
        step = step.tb_next
    for frame in frames:
        local = list(frame.f_locals.values())
        own = list(getattr(frame.f_locals.get("self"), "__dict__", {}).values())
        for value in local + own:
            name = getattr(value, "name", None) if isinstance(value, io.IOBase) else None
            if isinstance(name, str) and not name.startswith("<") and _writes(value):
                yield Path(name)


def _writes(file: io.IOBase) -> bool:
    mode = getattr(file, "mode", "")
    return isinstance(mode, str) and any(letter in mode for letter in "wax+")
