"""The GPUs that NVIDIA's driver reports (NVML), whether torch can use them or not."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

_MEGA = 1e6


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver on this machine.

    Attributes:
        gpus: Number of GPUs that it reports, whether torch can use them or not.
        version: Version of the driver, such as `535.104`.
        cuda: Newest CUDA release that it supports, such as (12, 2); None if unknown.
    """

    gpus: int = 0
    version: str = ""
    cuda: tuple[int, int] | None = None


class Gpus:
    """All GPUs of this machine; none without a driver."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        with suppress(pynvml.NVMLError):  # no driver, or one that is too old for this library
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]

    def driver(self) -> Driver:
        """The driver; one without GPUs if there is none."""
        if not self._handles:
            return Driver()
        cuda = None
        with suppress(pynvml.NVMLError):
            number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            cuda = (number // 1000, number % 1000 // 10)  # 12020 is 12.2
        return Driver(len(self._handles), str(pynvml.nvmlSystemGetDriverVersion()), cuda)

    def sample(self) -> list[dict[str, float]]:
        """Load and memory in percent, memory in MB and power in watts of each GPU, if the driver reports them."""
        return [self._figures(number, handle) for number, handle in enumerate(self._handles)]

    @staticmethod
    def _figures(number: int, handle: Any) -> dict[str, float]:
        figures: dict[str, float] = {"gpu": number}
        with suppress(pynvml.NVMLError):
            figures["load"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        with suppress(pynvml.NVMLError):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            figures |= {"memory_mb": memory.used / _MEGA, "memory": 100.0 * memory.used / max(1, memory.total)}
        with suppress(pynvml.NVMLError):
            figures["watts"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0
        return figures
