"""Weights in a file that several processes of one machine map into their memory: hogwild's."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from storage.locks import file_lock

LOCK_S = 60.0
_NAME = 64
"""Bytes that name the session at the file's beginning; each learner's count of updates follows."""
_PAGE = 4096


class SharedWeights:
    """A flat model, and how often each learner has changed it.

    Each learner counts in a place of its own, so that counts need no lock either.

    Args:
        path: The file; made by whoever comes first.
        size: Weights.
        slot: This learner's number.
        slots: Learners.
    """

    def __init__(self, path: Path, size: int, slot: int, slots: int) -> None:
        self._path, self._slot = path, slot
        head = -(-(_NAME + 8 * slots) // _PAGE) * _PAGE
        with file_lock(path.with_suffix(".lock"), LOCK_S), path.open("ab") as file:
            file.truncate(head + 4 * size)
            if hasattr(os, "posix_fallocate"):  # a write to a mapped page that has no room kills the process (SIGBUS)
                os.posix_fallocate(file.fileno(), 0, head + 4 * size)
        data = np.memmap(path, dtype=np.uint8, mode="r+")
        self._session = data[:_NAME]
        self._counts = data[_NAME : _NAME + 8 * slots].view(np.int64)
        self._weights = torch.from_numpy(data[head:].view(np.float32))

    def enter(self, session: str, weights: Tensor) -> Tensor:
        """The shared weights; the first learner of a session brings them.

        Args:
            session: Name of the session; an empty one takes what is there.
            weights: What to begin with.
        """
        name = np.zeros(_NAME, dtype=np.uint8)
        name[: len(session.encode())] = np.frombuffer(session.encode(), dtype=np.uint8)
        with file_lock(self._path.with_suffix(".lock"), LOCK_S):
            if session and not np.array_equal(self._session, name):
                self._weights.copy_(weights)
                self._counts[:] = 0
                self._session[:] = name
        return self._weights

    def count(self) -> None:
        """This learner has changed the weights."""
        self._counts[self._slot] += 1

    def updates(self) -> int:
        """Changes by all learners in this session."""
        return int(self._counts.sum())
