"""Loads batches ahead of the training step, although the order of the next batches may still change.

Threads load them, or wait for processes that do. Threads share Python's interpreter lock with the training step, which
launches thousands of operations from Python. A process returns a batch in a block of memory that has no name: nothing
of it is left when a process is killed, and the size of /dev/shm, which is small in containers, does not matter.
"""

import logging
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from devices.worker_processes import follow_parent, starting_workers
from training.learner.task import DrawingTask, TrainingBatch, TrainingSet

log = logging.getLogger(__name__)
Rows = NDArray[np.int64]

_RESTARTS = 3
"""Times that each loader process is replaced, if it is killed."""
_PATIENCE_S = 600.0
"""How long a batch may take in a loader process; reads from object stores end before, or fail."""
_END_S = 2.0
"""How long loader processes may take to end before they are killed."""
_ALIGNED = 64
"""Bytes that tensors in a block of memory begin at multiples of, as torch's own do."""


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
        return self.ready(self.task.drawn(self.data.batch(rows), epoch))

    def ready(self, batch: TrainingBatch) -> TrainingBatch:
        """Page-lock a batch that is trained on a GPU."""
        return batch.pinned() if self.device.type == "cuda" else batch


class LoaderProcesses:
    """Loads batches in processes of their own, bit for bit as a loader of this process would.

    The loader of this process steps in while processes start, when one is killed, and for a batch that a process cannot
    load, so that an error is raised here.

    Args:
        loader: The loader of this process.
        opened: Opens the loader of each process, on the CPU; it is pickled.
        count: Number of processes; one waits for as many batches at the same time in threads of its own.
    """

    def __init__(self, loader: Loader, opened: Callable[[], Loader], count: int) -> None:
        self._loader, self._opened = loader, opened
        self._lock = threading.Lock()
        self._closed = False
        self._restarts = _RESTARTS * count
        self._idle: list[_LoaderProcess] = []
        self._busy: list[_LoaderProcess] = []
        for _ in range(count):
            self._start()

    def __call__(self, rows: Rows, epoch: int) -> TrainingBatch:
        """Load the batch of some rows in an epoch."""
        process = self._take()
        if process is not None:
            try:
                batch = process.load(rows, epoch)
            except (EOFError, OSError, RuntimeError) as error:  # the last one without a free file descriptor
                self._replace(process, error)
                batch = None
            else:
                self._put(process)
            if batch is not None:
                return self._loader.ready(batch)
        return self._loader(rows, epoch)

    @property
    def waiting(self) -> list[int]:
        """Ids of the processes that have opened their data and wait for work."""
        with self._lock:
            return [process.pid for process in self._waiting()]

    def _start(self) -> None:
        try:
            self._idle.append(_LoaderProcess(self._opened))
        except OSError as error:
            log.warning("a loader process cannot be started (%s): batches are loaded in this process instead", error)

    def _take(self) -> "_LoaderProcess | None":
        """A process that can load a batch now; it counts as busy."""
        with self._lock:
            if not (waiting := self._waiting()):
                return None
            self._idle.remove(waiting[0])
            self._busy.append(waiting[0])
            return waiting[0]

    def _waiting(self) -> "list[_LoaderProcess]":
        """The idle processes that can load; those that have ended at their start are given up."""
        opened = []
        for process in tuple(self._idle):
            try:
                if process.has_opened():
                    opened.append(process)
            except (EOFError, OSError):
                self._idle.remove(process)
                log.warning("a loader process has ended at its start: batches are loaded in this process instead")
        return opened

    def _put(self, process: "_LoaderProcess") -> None:
        with self._lock:
            self._busy.remove(process)
            self._idle.insert(0, process)  # what it has in its caches was used last

    def _replace(self, process: "_LoaderProcess", error: Exception) -> None:
        """Start another process for one that has ended while it loaded, unless that has happened too often."""
        with self._lock:
            self._busy.remove(process)
            process.kill()
            if self._closed:
                return
            again, self._restarts = self._restarts > 0, self._restarts - 1
            then = "another one starts" if again else "no other is started, since too many have"
            log.warning("a loader process is lost (%r), perhaps for want of memory: %s", error, then)
            if again:
                self._start()

    def close(self) -> None:
        """End the processes; those that are loading are not waited for."""
        with self._lock:
            self._closed = True
            idle, busy = self._idle, tuple(self._busy)
            self._idle = []
        for process in idle:
            process.release()
        for process in busy:
            process.kill()  # the thread that waits for it then puts it aside
        deadline = time.monotonic() + _END_S
        for process in idle:
            process.end(deadline)


class _LoaderProcess:
    """One process of `LoaderProcesses`, and the pipe to it: each request gets one answer.

    Args:
        opened: Opens its loader.
    """

    def __init__(self, opened: Callable[[], Loader]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, opened), name="loader", daemon=True)
        with theirs, starting_workers():
            self._process.start()
        self._has_opened = False

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid or 0

    def has_opened(self) -> bool:
        """Whether it can load.

        Raises:
            EOFError: If it has ended.
        """
        if not self._has_opened and self._pipe.poll():
            self._has_opened = self._pipe.recv()
        return self._has_opened

    def load(self, rows: Rows, epoch: int) -> TrainingBatch | None:
        """Have a batch loaded; None if that failed.

        Raises:
            EOFError, OSError: If the process has ended, or does not answer.
        """
        self._pipe.send((rows, epoch))
        if not self._pipe.poll(_PATIENCE_S):
            raise TimeoutError(f"no batch for {_PATIENCE_S:.0f} s")
        shapes = self._pipe.recv()
        if shapes is None:
            return None
        with os.fdopen(recv_handle(self._pipe), "rb") as file:
            return _laid_out(shapes, mmap.mmap(file.fileno(), 0))

    def release(self) -> None:
        """Let it end by itself; it must be idle."""
        self._pipe.close()

    def end(self, deadline: float) -> None:
        """Wait for its end, and kill it at a time of the monotonic clock."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill it; a thread that waits for it gets an EOFError."""
        self._process.kill()
        self._process.join(_END_S)


def _serve(pipe: Connection, opened: Callable[[], Loader]) -> None:
    """What a loader process does."""
    follow_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what Ctrl-C means is for the learner to decide
    loader = opened()
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):  # the learner has closed its end
        pipe.send(True)
        while True:
            _answer(pipe, loader, *pipe.recv())


def _answer(pipe: Connection, loader: Loader, rows: Rows, epoch: int) -> None:
    try:
        batch = loader(rows, epoch)
        descriptor = _shared(batch)
    except Exception as error:
        log.warning("the learner loads a batch that this process cannot load: %s: %s", type(error).__name__, error)
        pipe.send(None)
        return
    with os.fdopen(descriptor, "rb"):
        pipe.send(batch.each(lambda tensor: torch.empty_like(tensor, device="meta")))
        send_handle(pipe, descriptor, 0)


def _shared(batch: TrainingBatch) -> int:
    """Copy a batch's tensors to a new block of memory; its file descriptor."""
    size = sum(_room(tensor) for tensor in batch.tensors())
    descriptor = os.memfd_create("batch")
    try:
        os.posix_fallocate(descriptor, 0, max(1, size))  # without room this is an error, a write would be a signal
        _laid_out(batch, mmap.mmap(descriptor, 0))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _laid_out(batch: TrainingBatch, memory: mmap.mmap) -> TrainingBatch:
    """A batch whose tensors lie one behind the other in a block of memory; those with content are copied there.

    Args:
        batch: The batch; its tensors may be on the device `meta`, without content.
        memory: The block, at least as large as the sum of `_room`.
    """
    begin = 0

    def lay(tensor: Tensor) -> Tensor:
        nonlocal begin
        count, offset = tensor.numel(), begin
        begin += _room(tensor)
        if not count:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        place = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset).view(tensor.shape)
        return place if tensor.is_meta else place.copy_(tensor)

    return batch.each(lay)


def _room(tensor: Tensor) -> int:
    """Bytes of a tensor in a block of memory."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED


class Prefetcher:
    """Provides batches by rows and epoch; those that were hinted are loaded in advance.

    Args:
        load: Loads the batch of some rows in an epoch; called from all threads.
        threads: Number of loading threads; it does not affect the order of batches, which the caller decides.
        begin: Initializer of each thread.
        end: Called by `close`.
    """

    def __init__(
        self,
        load: Callable[[Rows, int], TrainingBatch],
        threads: int = 1,
        begin: Callable[[], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._load, self._end = load, end
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
        if self._end is not None:
            self._end()
