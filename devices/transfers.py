"""Copies between host and GPU: those that the host does not wait for, and the few that it waits for on purpose.

While the host waits, it launches nothing, and the GPU idles afterwards. So a training step waits once, at its end.
Lengths start on the host: what follows from them is computed there, not read back from the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from configurable.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_KNOWN: ContextVar[dict[str, Tensor] | None] = ContextVar("what the host knows", default=None)
_ON_DEVICE: ContextVar[bool] = ContextVar("values stay on the device", default=False)


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


@contextmanager
def known_on_host(**values: Tensor) -> Iterator[None]:
    """Context in which the host knows values that networks get on a device; replaces those of an outer context.

    A context, since what stands between the caller and the layer that needs them may be compiled.

    Args:
        **values: Tensors on the CPU, by the name that the layer asks `on_host` for.
    """
    token = _KNOWN.set(values)
    try:
        yield
    finally:
        _KNOWN.reset(token)


@contextmanager
def without_host_values() -> Iterator[None]:
    """Context in which networks read nothing on the host, as a CUDA graph requires: `stays_on_device` says so.

    A graph would repeat what the host knows of one batch for all others, so the host knows nothing.
    """
    token = _ON_DEVICE.set(True)
    try:
        with known_on_host():
            yield
    finally:
        _ON_DEVICE.reset(token)


def stays_on_device() -> bool:
    """Whether networks must not read values of a device on the host, not even lengths."""
    return _ON_DEVICE.get()


def on_host(name: str, tensor: Tensor) -> Tensor:
    """A tensor on the CPU: what `known_on_host` names, or a copy, for which the host waits for a GPU."""
    if tensor.device.type == "cpu":
        return tensor
    known = (_KNOWN.get() or {}).get(name)
    if known is None:
        return tensor.cpu()
    assert known.shape[0] == tensor.shape[0], f"{name} of another batch"
    return known
