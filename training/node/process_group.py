"""The learners of one node: a process group that all-reduces gradients and takes decisions collectively.

A node of one learner creates no process group; the same calls then cost nothing.
"""

import datetime
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from devices.choice import SideStream, gpu_uuid
from training.learner.flat import FlatParameters, share
from training.node.comm_hooks import GradientBucket, Hook, run_hook

log = logging.getLogger(__name__)
TIMEOUT = datetime.timedelta(seconds=300)
"""For collectives: a dead rank is noticed at once (its connection closes), a suspended one after this time."""
BUCKET = 6_000_000
"""Gradient values that are all-reduced together, overlapping with the backward pass (24 MB)."""


def _blank(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


class NodeGroup:
    """The ranks of a node.

    Args:
        rank: This rank, from 0.
        size: Number of ranks of the node.
        meeting_point: Rendezvous of the ranks, specific to this start of the node: a file, or the store of
            `training.node.rendezvous`; unused (None) if the node has one rank.
        device: Device of the gradients.

    Attributes:
        shares_gpu: Whether some ranks share a GPU. NCCL refuses that, so Gloo connects all ranks: it copies the tensors
            of collectives through main memory, and sends and receives (point-to-point) tensors of main memory only.
    """

    def __init__(self, rank: int, size: int, meeting_point: Path | Store | None, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.shares_gpu = False
        self._control: dist.ProcessGroup | None = None
        if size > 1:
            # loopback unless configured otherwise: most nodes are one machine
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            store = FileStore(str(meeting_point), size) if isinstance(meeting_point, Path) else meeting_point
            assert store is not None
            self.shares_gpu = self._agree(store)
            backend = "nccl" if device.type == "cuda" and not self.shares_gpu else "gloo"
            # With device_id, NCCL creates its communicator here, on this device; otherwise the first collective does,
            # on the current device.
            bound = device if backend == "nccl" else None
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=bound)
            # control messages are CPU tensors: they must not wait for the GPU's queue
            self._control = dist.new_group(backend="gloo", timeout=TIMEOUT)
            if bound is not None:
                self._warm_up()

    def _agree(self, store: Store) -> bool:
        """Compare the devices of all ranks: NCCL and Gloo ranks would wait for each other forever.

        Returns:
            Whether some ranks share a GPU, the same at all ranks.

        Raises:
            ValueError: If only some are on GPUs, since a machine of the node has no GPU that torch can use.
        """
        store.set(f"device-{self.rank}", f"{self.device.type} {gpu_uuid(self.device)}")
        devices = [store.get(f"device-{rank}").decode() for rank in range(self.size)]
        kinds = [device.partition(" ")[0] for device in devices]
        if len(set(kinds)) > 1:
            on_cpu = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind == "cpu")
            raise ValueError(
                f"learners of this node are on GPUs, but those of rank {on_cpu} on a CPU: use train.device=cpu, or a "
                "GPU for each (`starling doctor` on that machine says what is wrong)"
            )
        gpus = len(set(devices))
        if self.device.type == "cpu" or gpus == self.size:
            return False
        if self.rank == 0:
            log.info(
                "the %d learners of this node share %d GPU(s): Gloo averages their gradients in main memory, which is "
                "slower than NCCL with a GPU for each",
                self.size,
                gpus,
            )
        return True

    def _warm_up(self) -> None:
        """Run a collective of all ranks: NCCL hangs if its first calls are point-to-point calls of some ranks."""
        ones = torch.ones(1, device=self.device)
        dist.all_reduce(ones)
        assert float(ones) == self.size

    def tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """Broadcast a message from rank 0.

        Args:
            message: JSON values; ignored except at rank 0.

        Returns:
            Rank 0's message, at every rank.
        """
        if self.size == 1:
            return message
        text = json.dumps(message).encode() if self.rank == 0 else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, 0, group=self._control)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.rank == 0 else _blank(int(length))
        dist.broadcast(data, 0, group=self._control)
        return dict(json.loads(data.numpy().tobytes()))

    def gather_text(self, text: str) -> list[str]:
        """Gather a text from every rank, in rank order."""
        if self.size == 1:
            return [text]
        octets = text.encode()
        longest = max(1, *(int(length) for (length,) in self.gather_numbers([len(octets)])))
        data = torch.frombuffer(bytearray(octets.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [_blank(longest) for _ in range(self.size)]
        dist.all_gather(parts, data, group=self._control)
        return [part.numpy().tobytes().rstrip(b"\0").decode() for part in parts]

    def gather_numbers(self, mine: list[float]) -> list[list[float]]:
        """Gather equally many numbers from every rank, in rank order."""
        if self.size == 1:
            return [mine]
        parts = [torch.zeros(len(mine), dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(parts, torch.tensor(mine, dtype=torch.float64), group=self._control)
        return [part.tolist() for part in parts]

    def all(self, mine: bool) -> bool:
        """Whether `mine` is true at every rank."""
        if self.size == 1:
            return mine
        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._control)
        return bool(flag)

    def any(self, mine: bool) -> bool:
        """Whether `mine` is true at any rank."""
        return not self.all(not mine)

    def share(self, total: int) -> tuple[int, int]:
        """The part [start, stop) of a flat buffer that this rank exchanges."""
        return share(total, self.rank, self.size)

    def gather_shares(self, mine: Tensor, total: int) -> Tensor:
        """All-gather the ranks' shares of a flat buffer.

        Args:
            mine: This rank's share, on the group's device.
            total: Number of elements of the whole buffer.
        """
        if self.size == 1:
            return mine
        width = -(-total // self.size)
        padded = torch.zeros(width, device=self.device, dtype=mine.dtype)
        padded[: mine.numel()] = mine
        whole = torch.empty(width * self.size, device=self.device, dtype=mine.dtype)
        dist.all_gather_into_tensor(whole, padded)
        return whole[:total]

    def collect(self, mine: list[Tensor], like: list[list[Tensor]]) -> list[list[Tensor]]:
        """Gather tensors from every rank at rank 0, in rank order; other ranks get an empty list.

        Args:
            mine: This rank's tensors, on the CPU, contiguous.
            like: Tensors with the shapes and types that each rank sends; used at rank 0 only.
        """
        if self.rank:
            for tensor in mine:
                dist.send(tensor, 0, group=self._control)
            return []
        gathered = [mine]
        for rank in range(1, self.size):
            gathered.append([torch.empty_like(tensor, device="cpu") for tensor in like[rank]])
            for tensor in gathered[-1]:
                dist.recv(tensor, rank, group=self._control)
        return gathered

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1:
            dist.destroy_process_group()


class GradientReducer:
    """Sums flat gradients over a node's ranks bucket by bucket, while the backward pass still runs.

    Buckets are sent in a fixed order, from the last parameters to the first: every rank must start the same collectives
    in the same order, whichever gradient is ready first (Li et al. 2020, arXiv:2006.15704, section 3.2).

    Args:
        group: The node's ranks.
        flat: Parameters whose gradients are summed.
        bucket: Minimum number of gradient values in a bucket; the last one may be smaller.
        hook: How gradients travel; None all-reduces them uncompressed. A hook returns means, which are scaled to sums.
            Unused in a node of one rank.
    """

    def __init__(self, group: NodeGroup, flat: FlatParameters, bucket: int = BUCKET, hook: Hook | None = None) -> None:
        self.hook = hook
        self._group, self._flat = group, flat
        self._buckets: list[tuple[int, int]] = []
        self._bucket_of: list[int] = [0] * len(flat.spans)
        self._cut(bucket)
        self._waits: list[Callable[[], object]] = []
        self._missing: list[int] = []
        self._held = False
        self._reset()
        # A hook may run several collectives per bucket, as PowerSGD does, and Gloo matches collectives by their order
        # alone. So one bucket must be finished before the next one starts: a single thread runs them in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradients")
        # Gloo's futures do not make streams wait for their tensors, and their callbacks run in Gloo's threads, on the
        # default stream: with the hook there, too, all of it is in order.
        self._stream = SideStream(flat.grads.device, own=not group.shares_gpu)
        if group.size > 1:
            for number, parameter in enumerate(flat.parameters):
                parameter.register_post_accumulate_grad_hook(self._ready(number))  # type: ignore[no-untyped-call]

    def _cut(self, bucket: int) -> None:
        stop = self._flat.num_parameters
        for number in reversed(range(len(self._flat.spans))):
            start = self._flat.spans[number][0]
            self._bucket_of[number] = len(self._buckets)
            if stop - start >= bucket or start == 0:
                self._buckets.append((start, stop))
                stop = start

    def _ready(self, number: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if self._held:
                return
            self._missing[self._bucket_of[number]] -= 1
            self._send_ready()

        return ready

    def _reset(self) -> None:
        self._waits = []
        self._missing = [self._bucket_of.count(number) for number in range(len(self._buckets))]

    def _send_ready(self) -> None:
        while len(self._waits) < len(self._buckets) and not self._missing[len(self._waits)]:
            self._send(len(self._waits))

    def _send(self, number: int) -> None:
        start, stop = self._buckets[number]
        grads = self._flat.grads[start:stop]
        if self.hook is not None:
            ready = self._stream.mark()
            self._waits.append(self._thread.submit(self._exchange, self.hook, number, grads, ready).result)
            return
        work = dist.all_reduce(grads, async_op=True)
        assert work is not None
        self._waits.append(work.wait)

    def _exchange(self, hook: Hook, number: int, grads: Tensor, ready: torch.cuda.Event | None) -> None:
        parameters = [p for p, of in zip(self._flat.parameters, self._bucket_of, strict=True) if of == number]
        with self._stream.after(ready):
            mean = run_hook(hook, GradientBucket(number, number == len(self._buckets) - 1, grads, parameters))
            torch.mul(mean, self._group.size, out=grads)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold back further buckets while gradients are recomputed in several backward passes.

        Buckets that have been sent already hold the sums of the whole batch: these are kept.
        """
        for wait in self._waits:
            wait()
        self._stream.join()
        brought = [(start, stop, self._flat.grads[start:stop].clone()) for start, stop in self._gone()]
        self._waits = [lambda: None for _ in self._waits]
        self._held = True
        try:
            yield
        finally:
            self._held = False
        for start, stop, sums in brought:
            self._flat.grads[start:stop].copy_(sums)

    def _gone(self) -> list[tuple[int, int]]:
        """The buckets of this step that have been sent."""
        return self._buckets[: len(self._waits)]

    def finish(self) -> None:
        """Send the remaining buckets (of parameters without a gradient in this step) and wait for all sums."""
        if self._group.size == 1:
            return
        while len(self._waits) < len(self._buckets):
            self._send(len(self._waits))
        for wait in self._waits:
            wait()
        self._stream.join()
        self._reset()
