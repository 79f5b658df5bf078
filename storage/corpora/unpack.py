"""Archives from elsewhere, unpacked safely: no path leaves the folder, nothing but files is made, and not too many.

No symbolic link is ever created, so no later member can be led through one. A link to a file of the archive itself
becomes a hard link, or a copy; any other link, device or pipe is left out and counted.
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

_BLOCK = 1 << 20
_MAX_MEMBERS = 20_000_000
_MAX_RATIO = 20
_MIN_LIMIT = 1 << 30


class UnsafeArchiveError(ValueError):
    """An archive that is damaged, or that would write where or how much it must not."""


@dataclass
class Unpacked:
    """What came out of an archive.

    Attributes:
        files: regular files written.
        bytes: their sizes together.
        left_out: links that lead elsewhere, devices and the like.
    """

    files: int = 0
    bytes: int = 0
    left_out: int = 0


def unpack(archive: Path, folder: Path, max_bytes: int | None = None) -> Unpacked:
    """Unpack a tar (compressed or not) or a zip below a folder; files that exist are replaced.

    Args:
        archive: the file.
        folder: made if missing.
        max_bytes: what may come out in all; by default 20 times the archive's size, at least 1 GiB.

    Raises:
        UnsafeArchiveError: a name leaves the folder, more comes out than may, or the archive is damaged.
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
        raise UnsafeArchiveError(f"{archive} is damaged or no archive ({error}): fetch it again") from error


def _untar(archive: Path, folder: Path, limit: int) -> Unpacked:
    done, links = Unpacked(), list[tuple[str, str]]()
    blocks = [b""]
    with tarfile.open(archive, "r|*", tarinfo=_watched(blocks)) as tar:
        for number, member in enumerate(tar):
            vars(tar)["members"] = []  # tarfile keeps them all, and a corpus has millions
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
        raise UnsafeArchiveError(f"{archive} is cut or damaged: its end marker is missing: fetch it again")
    for name, target in links:
        _link(name, target, folder, done, limit, archive)
    return done


def _watched(blocks: list[bytes]) -> type[tarfile.TarInfo]:
    """Members that keep the last header: tarfile ends alike at the end marker, at a cut, and at a damaged header."""

    class Watched(CheckedTarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
            blocks[0] = bytes(buf)
            return super().frombuf(buf, encoding, errors)

    return Watched


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
    """Where a member goes.

    Raises:
        UnsafeArchiveError: that is not below the folder.
    """
    parts = PurePosixPath(name).parts
    odd = "\\" in name or any(ord(character) < 32 for character in name)
    if not parts or name.startswith("/") or ".." in parts or odd or len(name) > 4096:
        raise UnsafeArchiveError(f"{archive}: the member {name[:120]!r} would leave {folder}: do not use this archive")
    path = folder.joinpath(*parts)
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise UnsafeArchiveError(f"{path} leads out of {folder} through a link that is there: remove it")
    return path


def _write(content: IO[bytes], size: int, path: Path, done: Unpacked, limit: int, archive: Path) -> None:
    if size < 0 or done.bytes + size > limit:
        raise UnsafeArchiveError(f"{archive} holds more than {limit} bytes: is this the right archive?")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    written = 0
    with path.open("wb") as file:
        while block := content.read(_BLOCK):
            written += len(block)
            if done.bytes + written > limit:
                raise UnsafeArchiveError(f"{archive} holds more than {limit} bytes: is this the right archive?")
            file.write(block)
    if written != size:
        raise UnsafeArchiveError(f"{archive} is cut in the middle of {path.name!r}: fetch it again")
    done.files += 1
    done.bytes += written


def _link(name: str, target: str, folder: Path, done: Unpacked, limit: int, archive: Path) -> None:
    """A file of the archive under a second name."""
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
            raise UnsafeArchiveError(f"{archive} holds more than {limit} bytes: is this the right archive?") from None
        shutil.copyfile(source, path)
        done.bytes += source.stat().st_size
    done.files += 1


def _check_count(number: int, archive: Path) -> None:
    if number >= _MAX_MEMBERS:
        raise UnsafeArchiveError(f"{archive} has more than {_MAX_MEMBERS} members: is this the right archive?")
