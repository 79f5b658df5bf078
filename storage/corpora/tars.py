"""Members of uncompressed tar files as byte ranges; nothing is unpacked, and member names are not used as paths."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from storage.safety import TAR_ERRORS, CheckedTarInfo, UnsafeTarError

_MAX_NAME = 4096  # characters: Linux's PATH_MAX


class TarMember(NamedTuple):
    """A regular file in a tar: `length` bytes of the tar from `offset` on."""

    name: str
    offset: int
    length: int


def tar_members(path: Path) -> Iterator[TarMember]:
    """Yield the regular files of a tar in order; reads only headers.

    Raises:
        UnsafeTarError: the file is compressed, damaged or truncated; raised after the intact members were yielded.
    """
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:", tarinfo=CheckedTarInfo) as tar:
            for info in tar:
                vars(tar)["members"] = []  # tarfile would keep all of a corpus's millions of members
                if not info.isreg() or info.sparse is not None:
                    continue
                if info.size < 0 or info.offset_data + info.size > size:
                    raise UnsafeTarError(f"{path}: truncated within {info.name[:120]!r}. Fetch it again.")
                yield TarMember(info.name[:_MAX_NAME], info.offset_data, info.size)
            end = tar.offset
    except UnsafeTarError:
        raise
    except TAR_ERRORS as error:
        raise UnsafeTarError(f"{path}: compressed, damaged or truncated ({error}). Fetch it again.") from error
    with path.open("rb") as file:
        file.seek(end)
        block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE or block.count(0) != len(block):
        raise UnsafeTarError(f"{path}: damaged or truncated after byte {end}. Fetch it again.")


def read_member(path: Path, member: TarMember, limit: int = 1 << 20) -> bytes:
    """Read the content of a small member.

    Raises:
        UnsafeTarError: the member is larger than `limit` bytes.
    """
    if member.length > limit:
        raise UnsafeTarError(f"{path}: {member.name[:120]!r} has {member.length} bytes, more than {limit}")
    with path.open("rb") as file:
        file.seek(member.offset)
        return file.read(member.length)
