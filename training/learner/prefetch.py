"""Loads batches ahead of the training step, in threads, although the order of the next batches may still change."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.learner.task import DrawingTask, TrainingBatch, TrainingSet

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Loader:
    """Does the part of a training step that needs no weights: reads, decodes, draws for augmentation, page-locks.

    Attributes:
        data: The training set.
        task: What is trained; it draws the augmentation.
        device: Device that batches are trained on.
    """

    data: TrainingSet
    task: DrawingTask[Any]
    device: torch.device

    def __call__(self, rows: Rows, epoch: int) -> TrainingBatch:
        """Load the batch of some rows in an epoch."""
        batch: TrainingBatch = self.task.drawn(self.data.batch(rows), epoch)
        return batch.pinned() if self.device.type == "cuda" else batch


class Prefetcher:
    """Provides batches by rows and epoch; those that were hinted are loaded in advance.

    Args:
        load: Loads the batch of some rows in an epoch; called from all threads.
        threads: Number of loading threads; it does not affect the order of batches, which the caller decides.
        begin: Initializer of each thread.
    """

    def __init__(
        self, load: Callable[[Rows, int], TrainingBatch], threads: int = 1, begin: Callable[[], None] | None = None
    ) -> None:
        self._load = load
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead", initializer=begin)
        self._loads: dict[tuple[bytes, int], Future[TrainingBatch]] = {}

    def hint(self, coming: Sequence[tuple[Rows, int]]) -> None:
        """Announce the batches that probably come next; earlier hints that are not repeated are dropped.

        Args:
            coming: Rows and epoch of each batch.
        """
        wanted = {(rows.tobytes(), epoch): rows for rows, epoch in coming if len(rows)}
        for key in self._loads.keys() - wanted.keys():
            self._loads.pop(key).cancel()
        for key, rows in wanted.items():
            if key not in self._loads:
                self._loads[key] = self._pool.submit(self._load, rows, key[1])

    def take(self, rows: Rows, epoch: int) -> TrainingBatch | None:
        """Return the batch of some rows in an epoch; None for no rows.

        Raises:
            ValueError: If loading failed.
        """
        if not len(rows):
            return None
        future = self._loads.pop((rows.tobytes(), epoch), None)
        return future.result() if future is not None else self._load(rows, epoch)

    def close(self) -> None:
        """Stop loading."""
        self._pool.shutdown(wait=False, cancel_futures=True)
