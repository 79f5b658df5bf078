"""Number of threads that torch computes with, and of cores for several that compute side by side."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from configurable.lazy import torch

_lock = threading.Lock()
_inside = 0
_before = 0


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: in small operations, several threads spend most of their time waiting for each other.

    On two cores with other work, two threads took 7 times the CPU time of one for voice activity, and 8 to 25 times
    for the features of short utterances. The number holds for the calling thread, but new threads inherit it:
    it is what it was before when the last of several threads has left.
    """
    global _inside, _before
    with _lock:
        if not _inside:
            _before = torch.get_num_threads()
        _inside += 1
    torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            torch.set_num_threads(_before)
