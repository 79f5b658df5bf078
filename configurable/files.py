"""Files that appear whole or not at all: written under a temporary name in the same folder, then renamed.

    replace_file(folder / "scores.json", json.dumps(scores).encode())
    with replacing(folder / "lm.arpa", sync=True) as file:
        file.writelines(lines)

A reader, or a process that is killed meanwhile, finds the old file or the new one.
"""

import fcntl
import hashlib
import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

TEMP_PREFIX = ".tmp-"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_sha256(path: Path) -> str:
    """As `file_sha256`, remembered for as long as the file's size and time of change stay."""
    about = path.stat()
    return _remembered(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=64)
def _remembered(path: Path, size: int, mtime_ns: int) -> str:
    return file_sha256(path)


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[BinaryIO]:
    """Open an unbuffered file that replaces `path` when the block ends without an error.

    Args:
        path: The file; its folder exists.
        sync: Whether it survives a crash of the machine from then on. Without it, the file may be empty after one.
    """
    with temporary_file(path.parent, subject=str(path)) as (file, temporary):
        yield file
        publish_file(temporary, path, sync)


def replace_file(path: Path, data: bytes, sync: bool = False) -> None:
    """Write a file as `replacing` does."""
    with replacing(path, sync) as file:
        file.write(data)


def create_private_file(path: Path, data: bytes) -> None:
    """Write a new file that only its owner may read, and sync it.

    Raises:
        FileExistsError: The file exists; it is not replaced.
    """
    with temporary_file(path.parent, subject=str(path), mode=0o600) as (file, temporary):
        file.write(data)
        os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, this never replaces a file


def publish_file(source: Path, target: Path, sync: bool = True) -> None:
    """Rename a file to its final path; if `sync`, sync its content before and the rename afterwards."""
    if sync:
        _sync(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
    if sync:
        _sync(target.parent)


@contextmanager
def temporary_file(folder: Path, subject: str = "", mode: int = 0o666) -> Iterator[tuple[BinaryIO, Path]]:
    """Create an unbuffered file with a temporary name; removes it at the end unless it was renamed.

    It is locked while it is written, which tells it from a file that a killed process has left.

    Args:
        folder: The file's folder.
        subject: What errors of opening and writing name; by default the file.
        mode: Its permissions, of which the umask is taken off.
    """
    path = folder / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    try:
        with _WholeFile.new(path, subject or str(path), mode) as file:
            with suppress(OSError):  # some network disks do not support locks
                fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process
            yield cast(BinaryIO, file), path
    finally:
        path.unlink(missing_ok=True)


class _WholeFile(io.FileIO):
    """An unbuffered file that writes all data or raises; the system may write only a part, for example on a full disk.

    Callers such as shutil and pyarrow ignore the result of `write`. Errors have an attribute `needed_bytes`: the size
    of the data that were to be written.
    """

    subject = ""
    """What errors name."""

    @classmethod
    def new(cls, path: Path, subject: str, mode: int) -> Self:
        """Create a file; its mode is that from the start."""
        try:
            file = cls(str(path), "xb", opener=lambda name, flags: os.open(name, flags, mode))
        except OSError as error:
            error.filename = subject
            raise
        file.subject = subject
        return file

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all data; returns the number of bytes."""
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            error.filename = self.subject
            error.needed_bytes = len(view)  # type: ignore[attr-defined]
            raise
        return done


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
