"""Which device a process computes on: chosen from an inventory of GPUs, so that no GPU is needed to test the choice."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from training.learner.gpus import Driver, Gpus

log = logging.getLogger(__name__)
_DRIVERS = {12: "525", 13: "580"}
"""The oldest NVIDIA driver for each CUDA release (NVIDIA's table of minor version compatibility)."""


@dataclass(frozen=True)
class Inventory:
    """What this machine has to compute on.

    Attributes:
        gpus: GPUs that torch can use.
        trouble: Why torch can use none although the machine has some, and the remedy; empty if all is well.
    """

    gpus: int = 0
    trouble: str = ""


def inventory() -> Inventory:
    """The GPUs of this machine."""
    if torch.cuda.is_available():
        return Inventory(torch.cuda.device_count())
    return Inventory(0, gpu_trouble(Gpus().driver(), torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES")))


def gpu_trouble(driver: Driver, wheel: str | None, visible: str | None = None) -> str:
    """Why torch sees no GPU on a machine, and the remedy; empty if there is none, or if it was hidden on purpose.

    Args:
        driver: What NVIDIA's driver says.
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


def pick_device(
    wanted: str, number: int = 0, found: Inventory | None = None, field: str = "train.device"
) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here.

    Args:
        wanted: What the configuration says.
        number: Which GPU of this machine; learners share GPUs where there are fewer.
        found: The machine's GPUs, by default looked up.
        field: Where it says so.

    Raises:
        ValueError: If CUDA is wanted and there is none.
    """
    found = found or inventory()
    if wanted == "cuda" and not found.gpus:
        why = found.trouble or "use 'auto' or 'cpu', or install NVIDIA's driver"
        raise ValueError(f"{field} is 'cuda' but torch sees no GPU: {why}")
    if wanted == "cpu" or not found.gpus:
        return torch.device("cpu")
    return torch.device("cuda", number % found.gpus)


def best_device(wanted: str, number: int = 0, found: Inventory | None = None) -> torch.device:
    """As `pick_device`, but the CPU where CUDA is wanted and there is none.

    For what runs beside or after training, on a machine that need not be one of the learners'.
    """
    found = found or inventory()
    if wanted == "cuda" and not found.gpus:
        log.warning("train.device is 'cuda' and this machine has no GPU that torch can use: this runs on its CPU")
        return torch.device("cpu")
    return pick_device(wanted, number, found)


def spare_device(wanted: str, learners: int, found: Inventory | None = None) -> torch.device:
    """A device for what runs beside the learners of this machine: a GPU that none of them uses, if there is one.

    Args:
        wanted: What the configuration says.
        learners: Learners of this machine, which take the first GPUs.
        found: The machine's GPUs, by default looked up.
    """
    return best_device(wanted, learners, found)


def rank_device(wanted: str, number: int, learners: int, found: Inventory | None = None) -> torch.device:
    """A learner's device.

    Args:
        wanted: What the configuration says.
        number: Which GPU of this machine.
        learners: Learners of its node on this machine.
        found: The machine's GPUs, by default looked up.

    Raises:
        ValueError: If CUDA is wanted and there is none, or if two learners of a node would share a GPU.
    """
    found = found or inventory()
    device = pick_device(wanted, number, found)
    if device.type == "cuda" and learners > found.gpus:
        # NCCL refuses two ranks on one GPU ("Duplicate GPU detected")
        raise ValueError(
            f"a node has {learners} learners on this machine, which has {found.gpus} GPU(s), and learners of a node "
            f"cannot share one: use train.learners_per_node={found.gpus} for each machine of the node, or "
            "train.device=cpu"
        )
    return device


def claim(device: torch.device) -> None:
    """Make a GPU this process's own: whatever does not name a device otherwise opens a context on the first GPU.

    Args:
        device: Of this process; nothing happens for a CPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # contexts, cuBLAS and cuDNN allocate beside torch's allocator, and say so in words
    said = str(error)
    return isinstance(error, RuntimeError) and (
        "CUDA error: out of memory" in said or "CUDA out of memory" in said or "_STATUS_ALLOC_FAILED" in said
    )


def release_memory(device: torch.device) -> None:
    """Give memory that is not in use back to the GPU, for others that share it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class SideStream:
    """A CUDA stream for another thread's work, beside this thread's; on a CPU nothing needs an order.

    A thread begins with the first GPU and its default stream, which waits for every other: work of a thread that
    states neither runs on the wrong device, or in the way of the backward pass.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """What the calling thread has queued so far, for `after`."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Queue the block's work on this stream, behind what was marked."""
        if self._stream is None:
            yield
            return
        assert mark is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def join(self) -> None:
        """Let the calling thread's further work wait for this stream's; the thread itself does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
