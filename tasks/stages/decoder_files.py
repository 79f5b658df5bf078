"""The files that a decoder reads (a language model, a list of words): needed from the start, part of a stage's key."""

import hashlib
from functools import lru_cache
from pathlib import Path

from speech.decoding import DecodeConfig
from tasks.stages.base import StageError


def with_digests(cfg: DecodeConfig) -> DecodeConfig:
    """The configuration with each file's SHA-256 in place of its path: what it says counts, not where it is.

    Raises:
        StageError: A file is not there.
    """
    check_files(cfg)
    return cfg.with_files(_digest)


def check_files(cfg: DecodeConfig) -> None:
    """See that the files are there.

    Raises:
        StageError: One is not; the message names the field.
    """
    for field, path in cfg.files().items():
        if not Path(path).is_file():
            raise StageError(f"decode.{field} names {path}, which is not there: correct the path, or make the file")


def _digest(path: str) -> str:
    status = Path(path).stat()
    return _sha256(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
