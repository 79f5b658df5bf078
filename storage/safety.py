"""Checks of untrusted tar files for dangerous members, damage and truncation, before anything is read.

Python's tarfile and the WebDataset loader stop silently at a damaged header or a truncation between two members, and
decoders that trust suffixes would execute members like `x.pyd` or `x.pickle`. `check_tar` rejects all of these.
"""

import io
import os
import tarfile
from pathlib import Path
from typing import BinaryIO, Self

ALLOWED_SUFFIXES = frozenset({"flac", "wav", "ogg", "opus", "mp3", "json", "txt", "npy"})
_BLOCK = tarfile.BLOCKSIZE
_MAX_NAMES = 1 << 20  # bytes of a tar's long names and extended headers, which tarfile reads into memory
_NAMES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class UnsafeTarError(ValueError):
    """A tar file is damaged, or contains members other than speech and its descriptions."""


class CheckedTarInfo(tarfile.TarInfo):
    """Headers with validated sizes: tarfile would read a long name of any announced size into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a member's header.

        Raises:
            ValueError: its size is negative, or its name is unreasonably long.
        """
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in _NAMES and member.size > _MAX_NAMES):
            raise ValueError(f"a header claims {member.size} bytes")
        return member


TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, RecursionError)
"""Exceptions of tarfile for malformed files, given that `CheckedTarInfo` is used."""


def check_tar(tar: str | os.PathLike[str] | bytes | BinaryIO, label: str = "") -> None:
    """Check every header of an uncompressed tar file; does not extract or interpret members.

    Args:
        tar: a local path, the tar's content, or a seekable file.
        label: name in error messages; the path by default.

    Raises:
        UnsafeTarError: a member has an absolute name, "..", a suffix outside `ALLOWED_SUFFIXES`, or a duplicate name,
            or is not a regular file (link, device, folder, sparse); or the file is truncated or damaged.
    """
    if isinstance(tar, bytes):
        _check(io.BytesIO(tar), label or "tar in memory")
    elif isinstance(tar, str | os.PathLike):
        with Path(tar).open("rb") as file:
            _check(file, label or os.fspath(tar))
    else:
        _check(tar, label or "tar")


def _check(file: BinaryIO, label: str) -> None:
    seen: set[str] = set()
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=CheckedTarInfo) as tar:
            for member in tar:
                _check_member(member, label)
                if not 0 <= member.size <= size:  # an extended header may replace the size
                    raise ValueError(f"{member.size} bytes of a file of {size}")
                if member.name in seen:
                    raise UnsafeTarError(f"{label}: member {member.name!r} occurs twice. Write the shard again.")
                seen.add(member.name)
            end = tar.offset
    except UnsafeTarError:
        raise
    except TAR_ERRORS as error:
        raise UnsafeTarError(f"{label}: damaged or truncated ({error}). Fetch it or write it again.") from error
    _check_end(file, end, label)


def _check_member(member: tarfile.TarInfo, label: str) -> None:
    name = member.name
    shown = repr(name if len(name) <= 120 else name[:117] + "...")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
        raise UnsafeTarError(
            f"{label}: member {shown} is not a regular file (link, device, folder or sparse). Do not use it."
        )
    if name.startswith("/") or "\\" in name or ".." in name.split("/") or "\0" in name:
        raise UnsafeTarError(f"{label}: member {shown} would leave the folder it is unpacked in. Do not use this file.")
    key, dot, suffix = name.rpartition("/")[2].partition(".")
    if not key or not dot or suffix.rpartition(".")[2].lower() not in ALLOWED_SUFFIXES:
        allowed = ", ".join(sorted(ALLOWED_SUFFIXES))
        raise UnsafeTarError(f"{label}: member {shown} is not <id>.<suffix> with a suffix of {allowed}. Remove it.")


def _check_end(file: BinaryIO, end: int, label: str) -> None:
    """Check that a tar ends with two blocks of zeros: after a damaged header, other data follow."""
    file.seek(end)
    if len(file.read(2 * _BLOCK)) < 2 * _BLOCK:
        raise UnsafeTarError(
            f"{label}: truncated after byte {end}: the end marker is missing. Fetch it or write it again."
        )
    file.seek(end)
    while chunk := file.read(1 << 20):
        if chunk.count(0) != len(chunk):
            raise UnsafeTarError(
                f"{label}: damaged after byte {end}: no valid header there. Fetch it or write it again."
            )
