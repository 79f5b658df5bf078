"""The replica that a strategy's program sees: a real learner's weights and optimizer."""

import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from storage.locks import file_lock
from training.learner.compute import Learner
from training.learner.optim import drop_momentum

# --- weights in shared memory


LOCK_S = 60.0
_NAME = 64
"""Bytes at the start of the file that name the session; each learner's update count follows."""
_PAGE = 4096


class SharedWeights:
    """Flat weights in a file that several processes of one machine map into their memory, for hogwild.

    The file also holds the number of updates that each learner has made to them. Each has a counter of its own, so
    counting needs no lock.

    Args:
        path: The file; the first learner creates it.
        size: Number of weights.
        slot: This learner's number.
        slots: Number of learners.
    """

    def __init__(self, path: Path, size: int, slot: int, slots: int) -> None:
        self._path, self._slot = path, slot
        head = -(-(_NAME + 8 * slots) // _PAGE) * _PAGE
        with file_lock(path.with_suffix(".lock"), LOCK_S), path.open("ab") as file:
            file.truncate(head + 4 * size)
            if hasattr(os, "posix_fallocate"):  # on a full disk, a write to an unallocated mapped page raises SIGBUS
                os.posix_fallocate(file.fileno(), 0, head + 4 * size)
        data = np.memmap(path, dtype=np.uint8, mode="r+")
        self._session = data[:_NAME]
        self._counts = data[_NAME : _NAME + 8 * slots].view(np.int64)
        self._weights = torch.from_numpy(data[head:].view(np.float32))

    def enter(self, session: str, weights: Tensor) -> Tensor:
        """Return the shared weights; the first learner of a session initializes them.

        Args:
            session: Name of the session; empty to take the current weights.
            weights: Initial weights.
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
        """Count an update by this learner."""
        self._counts[self._slot] += 1

    def updates(self) -> int:
        """Updates by all learners in this session."""
        return int(self._counts.sum())


# --- the replica


class LearnerReplica:
    """A learner's weights and optimizer; implements `training.strategies.base.Replica`.

    Args:
        learner: Model and optimizer.
        shared: Memory that holds the weights, for hogwild.

    Attributes:
        lr: Learning rate of the next update.
        norm: L2 norm of the last gradient before clipping.
        scaled: Whether the gradients are already clipped, and finite.
    """

    def __init__(self, learner: Learner, shared: SharedWeights | None = None) -> None:
        self.learner, self.shared = learner, shared
        self.num_bytes = 4.0 * learner.flat.weights.numel()
        self.lr = self.norm = 0.0
        self.scaled = False
        self._updates = 0

    @property
    def weights(self) -> Tensor:
        """Flat fp32 weights."""
        return self.learner.flat.weights

    @property
    def grads(self) -> Tensor:
        """Flat gradients."""
        return self.learner.flat.grads

    @property
    def updates(self) -> int:
        """Optimizer steps on these weights, by all learners that share them."""
        return self.shared.updates() if self.shared else self._updates

    def clip(self) -> bool:
        """Clip the gradients, and return whether they are finite."""
        self.norm = self.learner.scale_gradient(1.0)
        return math.isfinite(self.norm)

    def update(self) -> None:
        """Make one optimizer step; a non-finite gradient is skipped."""
        if self.scaled or self.clip():
            self.learner.update(self.lr)
            self._updates += 1
            if self.shared:
                self.shared.count()

    def drop_momentum(self) -> None:
        """Reset the momentum: the next update depends on its gradient alone."""
        drop_momentum(self.learner.optimizer)
