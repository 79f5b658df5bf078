"""What a node's machine is busy with: CPU, memory, network, GPUs, as lines of the training's journal.

Read from /proc and from NVIDIA's management library, so that a node needs no further package; what a machine does not
tell is left out. One sample takes well under a millisecond, every ten seconds.
"""

import ctypes
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.coordinator.messages import CoordinatorError

EVERY_S = 10.0
"""Seconds between samples."""
_SOON_S = 0.5
_TICK_S = 0.001
"""Between the times of two samples at least: two at one time would be two values of the same point of a chart."""
_MOST_GPUS = 16
_MEGA = 1e6
_log = logging.getLogger(__name__)


class _Load(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver on this machine.

    Attributes:
        gpus: GPUs that it shows, whether torch can use them or not.
        version: Of the driver, such as `535.104`.
        cuda: Release of CUDA that it is for, such as (12, 2); None if it does not tell.
    """

    gpus: int = 0
    version: str = ""
    cuda: tuple[int, int] | None = None


class Gpus:
    """The GPUs that NVIDIA's driver shows (NVML, by its documented C interface); none without a driver."""

    def __init__(self) -> None:
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
            self._handles = self._open()
        except (OSError, AttributeError):  # no driver, or one from before these functions
            self._handles = []

    def _open(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        handles = [ctypes.c_void_p() for _ in range(min(count.value, _MOST_GPUS))]
        get = self._library.nvmlDeviceGetHandleByIndex_v2
        return [handle for number, handle in enumerate(handles) if not get(number, ctypes.byref(handle))]

    def driver(self) -> Driver:
        """The driver itself; one without GPUs if there is none."""
        if not self._handles:
            return Driver()
        text, number = ctypes.create_string_buffer(80), ctypes.c_int()
        self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        # 12020 is 12.2
        told = not self._library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
        cuda = (number.value // 1000, number.value % 1000 // 10) if told else None
        return Driver(len(self._handles), text.value.decode("ascii", "replace"), cuda)

    def sample(self) -> list[dict[str, float]]:
        """Load in percent, memory in MB, power in watts of each GPU, as far as it tells."""
        return [self._one(number, handle) for number, handle in enumerate(self._handles)]

    def _one(self, number: int, handle: ctypes.c_void_p) -> dict[str, float]:
        load, memory, power = _Load(), _Memory(), ctypes.c_uint()
        found: dict[str, float] = {"gpu": number}
        if not self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(load)):
            found["load"] = float(load.gpu)
        if not self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            found |= {"memory_mb": memory.used / _MEGA, "memory": 100.0 * memory.used / max(1, memory.total)}
        if not self._library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)):
            found["watts"] = power.value / 1000.0
        return found


class Machine:
    """Samples this machine.

    Args:
        proc: Where Linux tells of itself.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._gpus = Gpus()
        self._times = self._cpu_times()

    def sample(self) -> dict[str, Any]:
        """`cpu` in percent since the last sample, `memory` in percent and MB, network totals in MB, `gpus`."""
        found: dict[str, Any] = {**self._cpu(), **self._memory(), **self._network()}
        if gpus := self._gpus.sample():
            found["gpus"] = gpus
        return found

    def _lines(self, name: str) -> list[str]:
        try:
            return (self._proc / name).read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return []

    def _cpu_times(self) -> tuple[float, float] | None:
        """Busy and all ticks since the machine started."""
        words = next((line.split()[1:9] for line in self._lines("stat") if line.startswith("cpu ")), [])
        if len(words) < 5:
            return None
        ticks = [float(word) for word in words]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # without idle and waiting for disks

    def _cpu(self) -> dict[str, float]:
        before, now = self._times, self._cpu_times()
        self._times = now
        if before is None or now is None or now[1] <= before[1]:
            return {}
        return {"cpu": 100.0 * (now[0] - before[0]) / (now[1] - before[1])}

    def _memory(self) -> dict[str, float]:
        sizes = {}
        for line in self._lines("meminfo"):
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                sizes[name] = float(rest.split()[0]) * 1024
        if len(sizes) < 2 or not sizes["MemTotal"]:
            return {}
        used = sizes["MemTotal"] - sizes["MemAvailable"]
        return {"memory_mb": used / _MEGA, "memory": 100.0 * used / sizes["MemTotal"]}

    def _network(self) -> dict[str, float]:
        """Bytes over all interfaces but loopback."""
        received = sent = 0.0
        rows = [line.partition(":") for line in self._lines("net/dev") if ":" in line]
        for name, _, rest in rows:
            words = rest.split()
            if name.strip() != "lo" and len(words) > 8:
                received, sent = received + float(words[0]), sent + float(words[8])
        return {"received_mb": received / _MEGA, "sent_mb": sent / _MEGA} if rows else {}


class SystemFigures:
    """Writes samples to the journal from a thread, until it is closed.

    Args:
        node: Number of the node.
        journal: Takes a line; may refuse with CoordinatorError while the node has not joined.
        elapsed: Seconds of training.
        every_s: Seconds between samples.
    """

    def __init__(
        self,
        node: int,
        journal: Callable[[Mapping[str, Any]], None],
        elapsed: Callable[[], float],
        every_s: float = EVERY_S,
    ) -> None:
        self._about = {"kind": "system", "node": node, "host": socket.gethostname()}
        self._journal, self._elapsed, self._every_s = journal, elapsed, every_s
        self._machine = Machine()
        self._latest = -_TICK_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait_s = _SOON_S
        while not self._stop.wait(wait_s):
            wait_s = self._every_s
            try:
                at = self._time()
                self._journal({**self._about, "elapsed": at, **self._sample()})
                self._latest = at
            except CoordinatorError:  # it has not joined yet
                wait_s = min(_SOON_S, self._every_s)
            except (OSError, ValueError) as error:  # figures are worth no training
                _log.warning("the machine's figures could not be noted: %s", error)

    def _time(self) -> float:
        """Seconds of training, later than at the sample before: they stand still while a training waits for nodes."""
        return round(max(self._elapsed(), self._latest + _TICK_S), 3)

    def _sample(self) -> dict[str, Any]:
        sample = self._machine.sample()
        gpus = [{name: round(value, 1) for name, value in gpu.items()} for gpu in sample.pop("gpus", [])]
        return {name: round(value, 1) for name, value in sample.items()} | ({"gpus": gpus} if gpus else {})

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(5.0)
