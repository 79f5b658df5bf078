"""What an exchange does on a device: work that overlaps with training, and memory that other processes read.

Both are interfaces, each with its CUDA implementation.
"""

import logging
import os
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from typing_extensions import override

from training.exchange.mailbox import Floats, Mailbox

log = logging.getLogger(__name__)

Direction = Literal["down", "up", "across"]
"""To main memory, to the device, and between memory of this and of other processes on the device."""


class CopyEvent(ABC):
    """A point in a device's stream of work."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the device has reached this point."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has reached this point; never waits."""


Points = tuple["CopyEvent | None", ...]


class Copies(ABC):
    """What an exchange needs of a device: the training stream, and one stream per direction.

    Work of one direction runs in order, concurrently with training and the other direction, and starts after the given
    points. No method blocks the CPU, except `close`.
    """

    @abstractmethod
    def mark(self) -> CopyEvent:
        """Return the current end of the training stream's work."""

    @abstractmethod
    def follow(self, point: CopyEvent) -> None:
        """Make further work of the training stream wait for a point."""

    @abstractmethod
    def run(self, direction: Direction, work: Callable[[], object], after: Points = ()) -> CopyEvent:
        """Issue work in the direction's stream; returns the point at which it ends."""

    def copy(self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Points = ()) -> CopyEvent:
        """Copy between device and main memory; returns the point at which the copy ends."""
        return self.run(direction, lambda: target.copy_(source, non_blocking=True), after)

    def add(
        self,
        direction: Direction,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Points,
        first: bool,
        scale: float = 1.0,
    ) -> CopyEvent:
        """Add `scale * source` on the device, or overwrite the target if `first`; returns the point where that ends."""

        def work() -> None:
            if first:
                torch.mul(source, scale, out=target)
            else:
                target.add_(source, alpha=scale)

        return self.run(direction, work, after)

    def host(self, length: int) -> torch.Tensor:
        """Allocate fp32 main memory for small results, to which the device copies without blocking the CPU."""
        return torch.zeros(length)

    def close(self) -> None:  # noqa: B027 - not every device has something to close
        """Wait for all copies that were started."""


class _CudaPoint(CopyEvent):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # without `blocking`, a waiting thread keeps a core busy, and each learner has two of them
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()  # type: ignore[no-untyped-call]

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaCopies(Copies):
    """Work on a GPU, and copies between it and page-locked shared memory.

    Args:
        device: The GPU.
        mailbox: Shared memory that the copies use; None if they use none.
    """

    def __init__(self, device: torch.device, mailbox: Mailbox | None = None) -> None:
        self._device = device
        names = get_args(Direction)
        self._streams = {name: torch.cuda.Stream(device) for name in names}  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            parts = () if mailbox is None else (*mailbox.weights, *mailbox.deltas)
            codes = [_lock_pages(part, device) for part in parts]
        self._locked = [part for part, code in zip(parts, codes, strict=True) if code == 0]
        if any(codes):
            log.warning(
                "%d of the %d buffers shared with the exchange could not be page-locked (CUDA error %d): copies of the "
                "weights are slower; allow more locked memory (`ulimit -l unlimited`)",
                len(parts) - len(self._locked),
                len(parts),
                max(codes),
            )

    def mark(self) -> CopyEvent:
        """Record an event on the training stream."""
        return _CudaPoint(torch.cuda.current_stream(self._device))

    def follow(self, point: CopyEvent) -> None:
        """Make the training stream wait for the point's event."""
        assert isinstance(point, _CudaPoint)
        torch.cuda.current_stream(self._device).wait_event(point.event)

    @override
    def run(self, direction: Direction, work: Callable[[], object], after: Points = ()) -> CopyEvent:
        stream = self._streams[direction]
        for point in after:
            if isinstance(point, _CudaPoint):
                stream.wait_event(point.event)
        with torch.no_grad(), torch.cuda.stream(stream):
            work()
        return _CudaPoint(stream)

    @override
    def host(self, length: int) -> torch.Tensor:
        return torch.zeros(length).pin_memory()

    def close(self) -> None:
        """Wait for all streams and unlock the memory."""
        torch.cuda.synchronize(self._device)
        for part in self._locked:
            with suppress(RuntimeError):
                torch.cuda.cudart().cudaHostUnregister(part.ctypes.data)  # type: ignore[no-untyped-call]


def _lock_pages(part: Floats, device: torch.device) -> int:
    """Page-lock memory, so that copies are asynchronous; returns CUDA's error code, 0 if it worked.

    Copies work without, too. A failure stays pending, and the next kernel would raise it: it is raised here by an empty
    one.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(part.ctypes.data, part.nbytes, 0))  # type: ignore[no-untyped-call]
    if code:
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
    return code


# --- memory that other processes of the same machine read


Handle = dict[str, Any]
"""Describes memory to other processes, in JSON types."""


class PeerMemoryError(RuntimeError):
    """Another process's memory cannot be opened; the message says why."""


class PeerMemory(ABC):
    """Allocates memory that other processes of this machine can open, and opens theirs.

    A process writes only to its own memory and reads that of the others. So whatever a process does when it resumes
    after others have given it up, it cannot change their weights.
    """

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


_MOST_COPIES = 14
"""Vectors as large as the weights that an exchange in GPU memory needs at most: four of its own, two snapshots more,
and eight answers that neighbours are slow to read."""
_MEMORY_SHARE = 0.25
"""Share of a learner's GPU memory that these may take without being asked for."""


def unshared(device: torch.device, learners: int, size: int) -> str:
    """Why learners of one machine should not exchange in GPU memory; empty if they can. All learners find the same.

    Args:
        device: This learner's device; the others' GPUs follow each other, see `devices.choice.pick_device`.
        learners: Learners on the machine.
        size: Weights that a learner exchanges.
    """
    if device.type != "cuda":
        return "it trains on the CPU"
    gpus = torch.cuda.device_count()
    used = range(min(learners, gpus))
    for one in used:
        for other in used:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} cannot access GPU {other}"
    sharing = -(-learners // gpus)
    # of the first GPU, and not what is free now: all learners must decide alike
    memory = torch.cuda.get_device_properties(0).total_memory / sharing
    needed = 4 * size * _MOST_COPIES
    if needed > _MEMORY_SHARE * memory:
        return f"it may take {1e-9 * needed:.1f} of {1e-9 * memory:.1f} GB of GPU memory"
    return ""
