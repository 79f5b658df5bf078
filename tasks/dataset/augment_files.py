"""Digest of the recordings that augmentation uses; a part of a training's key."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from speech.features import AugmentConfig
from speech.features.augment.bank import Bank

_ANY_RATE = 16000


def augment_digest(config: AugmentConfig) -> str:
    """SHA-256 of the names, sizes and modification times of all noises and impulse responses.

    Folders and tables include everything that they list, so a recording that is added, replaced or removed makes a new
    training. Paths are relative to their list, whose own location does not matter.

    Raises:
        BankError: If a list is missing or has no recordings.
    """
    digest = hashlib.sha256()
    for name in config.file_lists():
        for line in sorted(_lines(Path(name).expanduser())):
            digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[str]:
    recordings = Bank([str(path)], _ANY_RATE).recordings
    for file in _unique([path, *(recording.path for recording in recordings)]):
        if file.is_file():
            status = file.stat()
            yield f"{os.path.relpath(file, path)}\t{status.st_size}\t{status.st_mtime_ns}"
        elif file != path:
            yield f"{os.path.relpath(file, path)}\tmissing"


def _unique(paths: Iterable[Path]) -> Iterator[Path]:
    yield from dict.fromkeys(paths)
