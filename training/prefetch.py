"""Loads batches ahead of the training step, in threads, while which ones come next may still change."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from training.data import Batch

Rows = NDArray[np.int64]


class Prefetcher:
    """Batches by their rows, loaded before they are asked for where a hint came in time.

    Args:
        load: Loads the batch of some rows; from several threads if there are several.
        threads: That load. The order in which batches are taken is the caller's, however many there are.
        begin: What each thread does first.
    """

    def __init__(
        self, load: Callable[[Rows], Batch], threads: int = 1, begin: Callable[[], None] | None = None
    ) -> None:
        self._load = load
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead", initializer=begin)
        self._loads: dict[bytes, Future[Batch]] = {}

    def hint(self, coming: Sequence[Rows]) -> None:
        """Say what probably comes next; what was hinted before and is neither here nor taken is dropped."""
        wanted = {rows.tobytes(): rows for rows in coming if len(rows)}
        for key in self._loads.keys() - wanted.keys():
            self._loads.pop(key).cancel()
        for key, rows in wanted.items():
            if key not in self._loads:
                self._loads[key] = self._pool.submit(self._load, rows)

    def take(self, rows: Rows) -> Batch | None:
        """The batch of some rows; None for no rows.

        Raises:
            ValueError: Whatever loading them raises.
        """
        if not len(rows):
            return None
        future = self._loads.pop(rows.tobytes(), None)
        return future.result() if future is not None else self._load(rows)

    def close(self) -> None:
        """Stop loading."""
        self._pool.shutdown(wait=False, cancel_futures=True)
