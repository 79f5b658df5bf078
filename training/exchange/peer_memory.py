"""Memory of a device that other processes of the same machine read: the interface, and CUDA's implementation.

A process writes only to its own memory and reads that of the others. So whatever a process does when it resumes after
others have given it up, it cannot change their weights.
"""

import os
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

Handle = dict[str, Any]
"""Describes memory to other processes, in JSON types."""


class PeerMemoryError(RuntimeError):
    """Another process's memory cannot be opened; the message says why."""


class PeerMemory(ABC):
    """Allocates memory that other processes of this machine can open, and opens theirs."""

    @abstractmethod
    def allocate(self, length: int) -> tuple[torch.Tensor, Handle]:
        """Allocate zeroed fp32 memory [length]; returns it and the handle by which other processes open it."""

    @abstractmethod
    def open(self, handle: Handle, length: int) -> torch.Tensor:
        """Open another process's memory [length], to read it.

        Raises:
            PeerMemoryError: If it cannot be opened; the message says why.
        """

    def close(self) -> None:  # noqa: B027 - not every memory has something to close
        """Give up the memory that was allocated, whether or not others still have it open."""


class CudaPeerMemory(PeerMemory):
    """Memory of a GPU, shared by CUDA IPC.

    A handle cannot be opened by the process that made it. Memory that was opened stays mapped until its tensor is
    dropped, also if the other process has ended.

    Args:
        device: This process's GPU; memory of other GPUs is mapped into it if it can access them (peer to peer).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counters: list[tuple[bytes, int]] = []

    @override
    def allocate(self, length: int) -> tuple[torch.Tensor, Handle]:
        with _plain_segments():
            memory = torch.zeros(length, device=self._device)
        torch.cuda.synchronize(self._device)  # others may read it at once
        _, handle, size, offset, counter, place, *_ = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        self._counters.append((counter, place))
        return memory, {
            "machine": machine(),
            "handle": b64encode(handle).decode(),
            "bytes": size,
            "offset": offset,
            "counter": b64encode(counter).decode(),
            "place": place,
        }

    @override
    def open(self, handle: Handle, length: int) -> torch.Tensor:
        try:
            if handle["machine"] != machine():
                raise PeerMemoryError("it is on another machine")
            size, offset, place = (int(handle[name]) for name in ("bytes", "offset", "place"))
            memory, counter = (b64decode(handle[name], validate=True) for name in ("handle", "counter"))
            if size != 4 * length or offset < 0 or place < 0:
                raise PeerMemoryError(f"it has {size} bytes instead of {4 * length}")
            # without an event: its owner has waited for all work on it before it sent the handle
            parts = (memory, size, offset, counter, place, b"", False)
            storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *parts)  # type: ignore[no-untyped-call]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise PeerMemoryError(str(error)) from error
        empty = torch.empty(0, dtype=torch.float32, device=self._device)
        return empty.set_(storage, 0, (length,), (1,))

    @override
    def close(self) -> None:
        # else torch would keep the memory until every process that opened it says that it has dropped it
        for counter, place in self._counters:
            torch.UntypedStorage._release_ipc_counter_cuda(counter, place)  # type: ignore[attr-defined]
        self._counters.clear()


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Allocate without expandable segments, which other processes cannot open by a plain handle."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:True" not in settings:
        yield
        return
    change = torch._C._accelerator_setAllocatorSettings  # type: ignore[attr-defined]
    # a change resets the settings that it does not name
    change(settings.replace("expandable_segments:True", "expandable_segments:False"))
    try:
        yield
    finally:
        change(settings)


def machine() -> str:
    """Identifies the running system; the same in all its processes."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
