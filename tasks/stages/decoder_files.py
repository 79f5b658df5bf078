"""Files that a configuration names (a language model, words, a lexicon): needed from the start, part of a key."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from speech.choices import ChoiceWithFiles
from tasks.stages.base import StageError

Named = TypeVar("Named", bound=ChoiceWithFiles)


def with_digests(cfg: Named, section: str = "decode") -> Named:
    """The configuration with each file's SHA-256 in place of its path: what it says counts, not where it is.

    Args:
        cfg: The configuration.
        section: Its name in the pipeline's configuration.

    Raises:
        StageError: A file is not there.
    """
    check_files(cfg, section)
    return cfg.with_files(_digest)


def check_files(cfg: ChoiceWithFiles, section: str = "decode") -> None:
    """See that the files are there.

    Raises:
        StageError: One is not; the message names the field.
    """
    for field, path in cfg.files().items():
        file_digest(path, f"{section}.{field}")


def file_digest(path: str, field: str) -> str:
    """SHA-256 of a file that a field names.

    Raises:
        StageError: It is not there.
    """
    if not Path(path).is_file():
        raise StageError(f"{field} names {path}, which is not there: correct the path, or make the file")
    return _digest(path)


def _digest(path: str) -> str:
    status = Path(path).stat()
    return _sha256(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
