"""Arrays in files, for counts that memory does not hold; errors of a full disk name the file and what it needs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def load_array(path: Path) -> NDArray[Any]:
    """An array on disk, read as it is needed."""
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array.

    Raises:
        OSError: It does not fit on the disk; `needed_bytes` is its size.
    """
    with _room_for(path, array.nbytes):
        np.save(path, array, allow_pickle=False)


def make_array(path: Path, dtype: DTypeLike, length: int) -> np.memmap[Any, Any]:
    """Make an array on disk to write to, `[length]`; all of its space is taken at once.

    Raises:
        OSError: It does not fit on the disk; `needed_bytes` is its size.
    """
    size = length * np.dtype(dtype).itemsize
    with _room_for(path, size):
        whole = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(length,))
        if hasattr(os, "posix_fallocate"):  # on a full disk, a write to a mapped page without space raises SIGBUS
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, path.stat().st_size))
    return whole


@contextmanager
def _room_for(path: Path, size: int) -> Iterator[None]:
    """Names the file and its size if the block finds the disk full; numpy only says how many items it wrote."""
    try:
        yield
    except OSError as error:
        number = error.errno or (errno.ENOSPC if " requested and " in str(error) else 0)
        if number not in _FULL:
            raise
        full = OSError(number, os.strerror(number), str(path))
        full.needed_bytes = size  # type: ignore[attr-defined]
        raise full from error
