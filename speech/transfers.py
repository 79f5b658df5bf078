"""Copies between host and GPU: those that the host does not wait for, and the few that it waits for on purpose.

While the host waits, it launches nothing, and the GPU idles afterwards. So a training step waits once, at its end.
Lengths start on the host: what follows from them is computed there, not read back from the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from configurable.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def beside(host: Tensor, other: Tensor) -> Tensor:
    """A tensor of the host on another tensor's device; the host goes on while a GPU copies it."""
    if other.device.type == "cuda" and host.device.type == "cpu":
        host = host.pin_memory()  # itself if it is page-locked already; from other memory, the driver may wait
    return host.to(other.device, non_blocking=True)


@contextmanager
def expected_wait(device: torch.device) -> Iterator[None]:
    """Context in which the host may wait for a device, although `torch.cuda.set_sync_debug_mode` forbids it."""
    mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if not mode:
        yield
        return
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def read_back(*values: Tensor) -> list[float]:
    """Scalars of one device as numbers; the host waits for the device once."""
    with expected_wait(values[0].device):
        numbers: list[float] = torch.stack([value.detach().double() for value in values]).tolist()
    return numbers
