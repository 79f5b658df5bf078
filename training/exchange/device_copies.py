"""Copies between a device and main memory beside the training: what is needed of a device, and CUDA's way to do it."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch

from training.exchange.mailbox import Floats, Mailbox

Direction = Literal["down", "up"]


class CopyEvent(ABC):
    """A point in a device's work."""

    @abstractmethod
    def wait(self) -> None:
        """Until the device has got there."""


Points = tuple["CopyEvent | None", ...]


class Copies(ABC):
    """What a `DeviceMover` needs of a device: the training stream, and one more for each direction.

    Work of a direction is done in order, beside training and the other direction; it begins after the given points.
    Nothing here waits on the CPU.
    """

    @abstractmethod
    def mark(self) -> CopyEvent:
        """Where the training stream's work ends so far."""

    @abstractmethod
    def follow(self, point: CopyEvent) -> None:
        """Have the training stream's further work wait for a point."""

    @abstractmethod
    def copy(self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Points = ()) -> CopyEvent:
        """Copy between device and main memory; where that ends."""

    @abstractmethod
    def add(
        self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Points, first: bool
    ) -> CopyEvent:
        """Add on the device, or replace what is there if it is the first; where that ends."""

    def close(self) -> None:  # noqa: B027 - not every device has something to end
        """Wait for everything that has begun."""


class _CudaPoint(CopyEvent):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()  # type: ignore[no-untyped-call]


class CudaCopies(Copies):
    """Copies between a GPU and page-locked shared memory."""

    def __init__(self, device: torch.device, mailbox: Mailbox) -> None:
        self._device = device
        self._streams = {name: torch.cuda.Stream(device) for name in ("down", "up")}  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            self._locked = [part for part in (*mailbox.weights, *mailbox.deltas) if _lock_pages(part)]

    def mark(self) -> CopyEvent:
        """Record an event on the training stream."""
        return _CudaPoint(torch.cuda.current_stream(self._device))

    def follow(self, point: CopyEvent) -> None:
        """Have the training stream wait for the point's event."""
        assert isinstance(point, _CudaPoint)
        torch.cuda.current_stream(self._device).wait_event(point.event)

    def copy(self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Points = ()) -> CopyEvent:
        """Copy on the direction's stream."""
        return self._on(direction, after, lambda: target.copy_(source, non_blocking=True))

    def add(
        self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Points, first: bool
    ) -> CopyEvent:
        """Add, or replace, on the direction's stream."""
        return self._on(direction, after, lambda: target.copy_(source) if first else target.add_(source))

    def close(self) -> None:
        """Wait for all streams and unlock the memory."""
        torch.cuda.synchronize(self._device)
        for part in self._locked:
            with contextlib.suppress(RuntimeError):
                torch.cuda.cudart().cudaHostUnregister(part.ctypes.data)  # type: ignore[no-untyped-call]

    def _on(self, direction: Direction, after: Points, work: Callable[[], object]) -> CopyEvent:
        stream = self._streams[direction]
        for point in after:
            if isinstance(point, _CudaPoint):
                stream.wait_event(point.event)
        with torch.no_grad(), torch.cuda.stream(stream):
            work()
        return _CudaPoint(stream)


def _lock_pages(part: Floats) -> bool:
    """Page-lock memory, so that copies to and from it run beside everything else; without it they still work."""
    try:
        return int(torch.cuda.cudart().cudaHostRegister(part.ctypes.data, part.nbytes, 0)) == 0  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
