"""Number of threads that torch computes with, and of cores for several that compute side by side."""

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configurable.lazy import torch

_GROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows the limits of groups of processes, version 2."""
_OWN_GROUP = Path("/proc/self/cgroup")
"""Names this process's group: `0::/kubepods/pod1`."""

_lock = threading.Lock()
_inside = 0
_before = 0


def usable_cores() -> int:
    """Cores that this process may use: those that it may run on, as Slurm and `taskset` say, or its container's share.

    A container's limit (`limits.cpu` of Kubernetes, `--cpus` of Docker) is CPU time per time of one of its groups, and
    leaves all cores visible: as many threads as cores would be stopped together whenever it is used up.
    """
    return max(1, math.ceil(min(_visible_cores(), _granted_cores())))


def limit_libraries() -> None:
    """Let libraries that compute start a thread for each usable core, before they are imported: they see all cores.

    `OMP_NUM_THREADS` stays as it is if it is set.
    """
    if (cores := usable_cores()) < _visible_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))


def _visible_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _granted_cores() -> float:
    """The smallest limit of this process's group and those around it, in cores; infinite without one."""
    try:
        own = _OWN_GROUP.read_text()
    except OSError:
        return math.inf
    name = next((line.removeprefix("0::") for line in own.splitlines() if line.startswith("0::")), "/")
    group = _GROUPS / name.lstrip("/")
    return min(_limit(folder / "cpu.max") for folder in (group, *group.parents) if folder.is_relative_to(_GROUPS))


def _limit(file: Path) -> float:
    """Cores that a file grants: `200000 100000` are two, `max 100000` are all."""
    try:
        used, period = file.read_text().split()
        return int(used) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such limit: there is no file, or it says "max"
        return math.inf


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
