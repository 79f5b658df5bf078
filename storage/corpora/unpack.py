"""Safe unpacking of untrusted archives: only files, only inside the target folder, with limits of number and size.

Symbolic links are never created, so that later members cannot be written through one. Links to files of the archive
become hard links or copies; other links, devices and pipes are skipped and counted.
"""

import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Self

from storage.safety import TAR_ERRORS, CheckedTarInfo

_BLOCK = 1 << 20  # bytes that are written at once
_MAX_MEMBERS = 20_000_000  # ten times the clips of the largest Common Voice archive
_MAX_RATIO = 20  # unpacked to packed bytes: text packs ten times, compressed audio hardly
_MIN_LIMIT = 1 << 30  # unpacked bytes that any archive may have


class UnsafeArchiveError(ValueError):
    """The archive is damaged, would write outside the target folder, or exceeds the limits."""


@dataclass
class Unpacked:
    """Result of unpacking an archive.

    Attributes:
        files: number of files written.
        bytes: their total size.
        left_out: number of skipped links, devices and pipes.
    """

    files: int = 0
    bytes: int = 0
    left_out: int = 0


def unpack(archive: Path, folder: Path, max_bytes: int | None = None) -> Unpacked:
    """Unpack a tar (compressed or not) or a zip into a folder; replaces existing files.

    Args:
        archive: the archive file.
        folder: target folder; created if missing.
        max_bytes: limit of the total size; by default 20 times the archive's size, at least 1 GiB.

    Raises:
        UnsafeArchiveError: a member would leave the folder, a limit is exceeded, or the archive is damaged.
    """
    limit = max(_MIN_LIMIT, _MAX_RATIO * archive.stat().st_size) if max_bytes is None else max_bytes
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if zipfile.is_zipfile(archive):
            return _unzip(archive, folder, limit)
        return _untar(archive, folder, limit)
    except UnsafeArchiveError:
        raise
    except (*TAR_ERRORS, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
        raise UnsafeArchiveError(f"{archive} is damaged or not an archive ({error}): fetch it again") from error


def _untar(archive: Path, folder: Path, limit: int) -> Unpacked:
    done, links = Unpacked(), list[tuple[str, str]]()
    blocks = [b""]
    with tarfile.open(archive, "r|*", tarinfo=_last_header(blocks)) as tar:
        for number, member in enumerate(tar):
            vars(tar)["members"] = []  # tarfile would keep all of a corpus's millions of members
            _check_count(number, archive)
            if member.isreg() and member.sparse is None:
                content = tar.extractfile(member)
                assert content is not None
                _write(content, member.size, inside(folder, member.name, archive), done, limit, archive)
            elif member.issym() or member.islnk():
                base = PurePosixPath(member.name).parent if member.issym() else PurePosixPath()
                links.append((member.name, os.path.normpath(base / member.linkname)))
            elif not member.isdir():
                done.left_out += 1
    if len(blocks[0]) < tarfile.BLOCKSIZE or any(blocks[0]):
        raise UnsafeArchiveError(f"{archive} is truncated or damaged (no end marker): fetch it again")
    for name, target in links:
        _link(name, target, folder, done, limit, archive)
    return done


def _last_header(blocks: list[bytes]) -> type[tarfile.TarInfo]:
    """Member class that stores the last header: tarfile stops alike at end markers, truncations and damaged headers."""

    class LastHeader(CheckedTarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
            blocks[0] = bytes(buf)
            return super().frombuf(buf, encoding, errors)

    return LastHeader


def _unzip(archive: Path, folder: Path, limit: int) -> Unpacked:
    done = Unpacked()
    with zipfile.ZipFile(archive) as box:
        for number, member in enumerate(box.infolist()):
            _check_count(number, archive)
            mode = member.external_attr >> 16
            if member.is_dir():
                continue
            if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                done.left_out += 1
                continue
            if member.flag_bits & 1:
                raise UnsafeArchiveError(f"{archive} is encrypted: this is not the public archive")
            with box.open(member) as content:
                _write(content, member.file_size, inside(folder, member.filename, archive), done, limit, archive)
    return done


def inside(folder: Path, name: str, archive: Path) -> Path:
    """The target path of a member.

    Raises:
        UnsafeArchiveError: it is not inside the folder.
    """
    parts = PurePosixPath(name).parts
    odd = "\\" in name or any(ord(character) < 32 for character in name)
    if not parts or name.startswith("/") or ".." in parts or odd or len(name) > 4096:
        raise UnsafeArchiveError(f"{archive}: the member {name[:120]!r} would leave {folder}: do not use this archive")
    path = folder.joinpath(*parts)
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise UnsafeArchiveError(f"{path} is outside {folder} because of an existing symbolic link: remove the link")
    return path


def _write(content: IO[bytes], size: int, path: Path, done: Unpacked, limit: int, archive: Path) -> None:
    if size < 0 or done.bytes + size > limit:
        raise UnsafeArchiveError(f"{archive} unpacks to more than {limit} bytes: check its source")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    written = 0
    with path.open("wb") as file:
        while block := content.read(_BLOCK):
            written += len(block)
            if done.bytes + written > limit:
                raise UnsafeArchiveError(f"{archive} unpacks to more than {limit} bytes: check its source")
            file.write(block)
    if written != size:
        raise UnsafeArchiveError(f"{archive} is truncated within {path.name!r}: fetch it again")
    done.files += 1
    done.bytes += written


def _link(name: str, target: str, folder: Path, done: Unpacked, limit: int, archive: Path) -> None:
    """Create a link to a file of the archive."""
    if target.startswith(("/", "..")):
        done.left_out += 1
        return
    source, path = inside(folder, target, archive), inside(folder, name, archive)
    if not source.is_file() or source.is_symlink() or path.is_dir() or source == path:
        done.left_out += 1
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:  # a file system without hard links
        if done.bytes + source.stat().st_size > limit:
            raise UnsafeArchiveError(f"{archive} unpacks to more than {limit} bytes: check its source") from None
        shutil.copyfile(source, path)
        done.bytes += source.stat().st_size
    done.files += 1


def _check_count(number: int, archive: Path) -> None:
    if number >= _MAX_MEMBERS:
        raise UnsafeArchiveError(f"{archive} has more than {_MAX_MEMBERS} members: check its source")
