"""Pools of processes that end with their parent and stay silent on Ctrl-C."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker


def refuse_import_by_workers() -> None:
    """Check that this is no new process that imports the script which started it, to do its work once more.

    Python's own check comes when such a process starts processes, too. Work on the same output waits for a lock before
    that: the script's process for its workers, they for its lock.

    Raises:
        RuntimeError: If it is.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a script that runs a pipeline starts processes, which import it: put its calls below "
            '`if __name__ == "__main__":`, so that only the script itself makes them'
        )


def worker_pool(processes: int) -> ProcessPoolExecutor:
    """A pool of new interpreters; submit to it within `starting_workers`.

    A fork would inherit locks that threads of this process hold, among them those of torch's thread pools.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=begin_worker)


@contextmanager
def starting_workers() -> Iterator[None]:
    """Protect pool processes started in the block from Ctrl-C until they call `begin_worker`.

    Otherwise each would print a traceback from its imports. For this process the signal is delivered when the block
    ends.
    """
    resource_tracker.ensure_running()  # its start, with that of the first worker, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """Make this pool process end with its parent, even by SIGKILL, and end silently on Ctrl-C.

    Suitable as a pool's `initializer`. A worker holds both ends of the pool's queue, so it would wait forever after its
    parent was killed.
    """
    follow_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def follow_parent() -> None:
    """Make this process end with the one that started it by multiprocessing, even by SIGKILL.

    A thread watches the parent, because Linux's parent-death signal is sent when the thread that started this process
    ends, which is not always the main thread.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, name="parent", daemon=True).start()
