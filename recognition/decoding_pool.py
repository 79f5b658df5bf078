"""Searches in several processes: they hold Python's interpreter lock, so threads would take turns.

Recognizers whose search needs a network search in this process. Each process reads the decoder's files itself. A KenLM
binary is mapped into memory and shared between them; an ARPA file is not.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from devices.worker_processes import starting_workers, worker_pool
from recognition.recognizer import Recognizer
from speech.hypotheses import Hypothesis

log = logging.getLogger(__name__)
_SHARE = 64
"""Utterances that make another process worth its start of a few seconds."""
_AHEAD = 2
"""Batches that are searched while the next one is computed."""

T = TypeVar("T")


def useful_processes(recognizer: Recognizer[Any], wanted: int, utterances: int) -> int:
    """How many processes are worth their start: none for searches that are fast without, or that need this process."""
    most = min(wanted, utterances // _SHARE)
    return most if most > 1 and recognizer.elsewhere() else 0


class DecodingPool(Generic[T]):
    """Searches batches in the background, and gives their hypotheses in order.

    Args:
        recognizer: Searches what it has encoded; with fewer than two processes it does so here, at once.
        processes: Number of processes.
    """

    def __init__(self, recognizer: Recognizer[Any], processes: int) -> None:
        self._recognizer = recognizer
        self._waiting: deque[tuple[T, Any, list[Future[Hypothesis]] | None]] = deque()
        self._pool: ProcessPoolExecutor | None = worker_pool(processes) if processes > 1 else None
        self._elsewhere = recognizer.elsewhere() if self._pool else None

    def __enter__(self) -> "DecodingPool[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def use(self, recognizer: Recognizer[Any]) -> None:
        """Search the next batches with another decoder, and forget those before that have not been taken."""
        for _, _, futures in self._waiting:
            for future in futures or ():
                future.cancel()
        self._waiting.clear()
        self._recognizer = recognizer
        if self._pool is not None:
            self._elsewhere = recognizer.elsewhere()

    def each(self, encoded: Iterable[tuple[T, Any]]) -> Iterator[tuple[T, list[Hypothesis]]]:
        """Search batches; yields the item that came with each, and the hypotheses."""
        for what, batch in encoded:
            yield from self.add(what, batch)
        yield from self.rest()

    def add(self, what: T, encoded: Any) -> Iterator[tuple[T, list[Hypothesis]]]:
        """Add a batch; yields finished ones: the item that was added with it, and the hypotheses."""
        self._waiting.append((what, encoded, self._submit(encoded)))
        while len(self._waiting) > (_AHEAD if self._pool else 0):
            yield self._next()

    def rest(self) -> Iterator[tuple[T, list[Hypothesis]]]:
        """Wait for all batches."""
        while self._waiting:
            yield self._next()

    def _submit(self, encoded: Any) -> list[Future[Hypothesis]] | None:
        """A future for each utterance; None if the batch is searched here."""
        if self._pool is None or self._elsewhere is None:
            return None
        search, description, arrays = self._elsewhere
        try:
            with starting_workers():
                return [self._pool.submit(search, description, utterance) for utterance in arrays(encoded)]
        except BrokenProcessPool:
            return None

    def _next(self) -> tuple[T, list[Hypothesis]]:
        what, encoded, futures = self._waiting[0]
        hypotheses = None
        try:
            hypotheses = None if futures is None else [future.result() for future in futures]
        except (BrokenProcessPool, CancelledError):
            log.warning("a process that decodes was killed, perhaps for want of memory: this one goes on alone")
        if hypotheses is None:
            self._search_here()
            hypotheses = self._recognizer.search(encoded)
        self._waiting.popleft()
        return what, hypotheses

    def _search_here(self) -> None:
        """Do without processes from now on."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
