"""Chooses a process's device from an inventory of GPUs, which tests can make up without a GPU."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from configurable.lazy import torch
from devices.gpus import Driver, Gpus

log = logging.getLogger(__name__)
_RESERVED = 0.1
"""Share of a GPU's memory that learners who share it leave to the evaluator and to the processes' CUDA contexts."""
_DRIVERS = {12: "525", 13: "580"}
"""Oldest NVIDIA driver for each CUDA release (NVIDIA's table of minor version compatibility)."""


@dataclass(frozen=True)
class Inventory:
    """This machine's GPUs.

    Attributes:
        gpus: Number of GPUs that torch can use.
        trouble: Why torch cannot use the GPUs of this machine, and the remedy; empty if there is no problem.
    """

    gpus: int = 0
    trouble: str = ""


def inventory() -> Inventory:
    """Find the GPUs of this machine."""
    driver = Gpus().driver()
    if not (driver.gpus or _has_driver()):  # torch would find none, and takes seconds to import
        return Inventory()
    if torch.cuda.is_available():
        return Inventory(torch.cuda.device_count())
    return Inventory(0, gpu_trouble(driver, torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES")))


def _has_driver() -> bool:
    """Whether there is a driver through which torch could use a GPU: AMD's, or the library of NVIDIA's."""
    with suppress(OSError):
        return Path("/dev/kfd").exists() or bool(ctypes.CDLL("libcuda.so.1"))
    return False


def gpu_trouble(driver: Driver, wheel: str | None, visible: str | None = None) -> str:
    """Explain why torch sees no GPU, with a remedy; empty if the machine has none or they were hidden on purpose.

    Args:
        driver: NVIDIA's driver.
        wheel: CUDA release that torch was built for, such as `13.0`; None for a build without CUDA.
        visible: `CUDA_VISIBLE_DEVICES`, if it is set.
    """
    if not driver.gpus or (visible is not None and visible.strip() in ("", "-1")):
        return ""
    if wheel is None:
        return (
            f"this machine has {driver.gpus} GPU(s), but torch is a build without CUDA: install the regular one (pip "
            "install 'torch==2.11.*')"
        )
    release = int(wheel.partition(".")[0])
    if driver.cuda and driver.cuda[0] < release:
        oldest = _DRIVERS.get(release)
        needed = f"a driver of version {oldest} or later" if oldest else f"a driver for CUDA {wheel}"
        return (
            f"the NVIDIA driver {driver.version} is for CUDA {driver.cuda[0]}.{driver.cuda[1]}, too old for this torch "
            f"(CUDA {wheel}): install {needed}, or a torch that was built for CUDA {driver.cuda[0]}"
        )
    return (
        f"the driver {driver.version} shows {driver.gpus} GPU(s), but torch can use none: look at `nvidia-smi` and at "
        "CUDA_VISIBLE_DEVICES; after an update of the driver restart the machine"
    )


def check_device(wanted: str, machine: Inventory, field: str = "train.device") -> None:
    """Check that this machine has the device that `auto`, `cpu` or `cuda` means.

    Args:
        wanted: The configured device.
        machine: The machine's GPUs.
        field: Name of the configuration field, for the error.

    Raises:
        ValueError: If `wanted` is `cuda` and there is no GPU.
    """
    if wanted == "cuda" and not machine.gpus:
        why = machine.trouble or "use 'auto' or 'cpu', or install NVIDIA's driver"
        raise ValueError(f"{field} is 'cuda' but torch sees no GPU: {why}")


def pick_device(
    wanted: str, number: int = 0, machine: Inventory | None = None, field: str = "train.device"
) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means on this machine.

    Args:
        wanted: The configured device.
        number: Number of the GPU; learners share GPUs if there are fewer.
        machine: The machine's GPUs; detected if None.
        field: Name of the configuration field, for the error.

    Raises:
        ValueError: If `wanted` is `cuda` and there is no GPU.
    """
    machine = machine or inventory()
    check_device(wanted, machine, field)
    if wanted == "cpu" or not machine.gpus:
        return torch.device("cpu")
    return torch.device("cuda", number % machine.gpus)


def best_device(wanted: str, number: int = 0, machine: Inventory | None = None) -> torch.device:
    """Like `pick_device`, but fall back to the CPU if `wanted` is `cuda` and there is no GPU.

    For processes that run beside or after training, possibly on a machine without learners.
    """
    machine = machine or inventory()
    if wanted == "cuda" and not machine.gpus:
        log.warning("train.device is 'cuda' and this machine has no GPU that torch can use: this runs on its CPU")
        return torch.device("cpu")
    return pick_device(wanted, number, machine)


def spare_device(wanted: str, learners: int, machine: Inventory | None = None) -> torch.device:
    """Device of a process that runs beside this machine's learners: a GPU that none of them uses, if there is one.

    Args:
        wanted: The configured device.
        learners: Number of learners on this machine, which take the first GPUs.
        machine: The machine's GPUs; detected if None.
    """
    return best_device(wanted, learners, machine)


def gpu_uuid(device: torch.device) -> str:
    """Identifier of a GPU, different from that of any other GPU of any machine; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def claim(device: torch.device) -> None:
    """Make a GPU the current device: otherwise, calls without a device open a context on the first GPU.

    Args:
        device: This process's device; a CPU needs nothing.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def share_gpu(device: torch.device, learners: int, machine: Inventory | None = None) -> None:
    """Limit this process to its share of a GPU's memory if other learners of this machine use the same GPU.

    Without a limit, the first learner takes what it can get, and the others divide their batches for ever.

    Args:
        device: This learner's device.
        learners: Learners on this machine; their GPUs follow each other, see `pick_device`.
        machine: The machine's GPUs; detected if None.
    """
    gpus = (machine or inventory()).gpus
    if device.type != "cuda" or not gpus:
        return
    sharing = len(range(device.index or 0, learners, gpus))
    if sharing < 2:
        return
    share = (1 - _RESERVED) / sharing
    torch.cuda.set_per_process_memory_fraction(share, device)
    turns = (
        "NVIDIA's MPS lets them compute at the same time"
        if mps_runs()
        else "they compute in turns (faster with NVIDIA's MPS: nvidia-cuda-mps-control -d)"
    )
    log.info("%d learners share %s, each with at most %.0f %% of its memory; %s", sharing, device, 100 * share, turns)


def mps_runs() -> bool:
    """Whether the daemon of NVIDIA's Multi-Process Service runs, which CUDA programs then use by themselves."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()  # noqa: S108


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device is out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # contexts, cuBLAS and cuDNN bypass torch's allocator: their errors are recognized by their text only
    message = str(error)
    return isinstance(error, RuntimeError) and (
        "CUDA error: out of memory" in message or "CUDA out of memory" in message or "_STATUS_ALLOC_FAILED" in message
    )


def release_memory(device: torch.device) -> None:
    """Return unused cached memory to the GPU, for other processes that share it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the random numbers that are drawn on the CPU and on a device.

    `torch.manual_seed` does it for all kinds of devices, and notes the caller's stack for each kind that is not in use:
    0.1 to 0.4 ms, which each training step would wait for.

    Args:
        device: Device of the computation.
        seed: The seed, the same numbers as from `torch.manual_seed`.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


class SideStream:
    """A CUDA stream for the work of another thread; does nothing on a CPU.

    A new thread's current device is the first GPU, and its current stream the default one, which synchronizes with all
    others: without a stream of its own, its work runs on the wrong device or delays the backward pass.

    Args:
        device: Device of the work.
        own: Whether the work has a stream of its own, or else runs on the device's default stream.
    """

    def __init__(self, device: torch.device, own: bool = True) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device) if own else torch.cuda.default_stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """Mark what the calling thread has queued so far, for `after`."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Context that queues work on this stream, after everything before the mark."""
        if self._stream is None:
            yield
            return
        assert mark is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def join(self) -> None:
        """Make the calling thread's stream wait for this one; the thread itself does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
