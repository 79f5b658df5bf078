"""Weights as bytes: fp32, or bf16 rounded to nearest; little-endian."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from training.exchange.mailbox import Floats

WireKind = Literal["fp32", "bf16"]
Buffer = Any  # whatever has the buffer protocol


_CHUNKS = 16
_LEAST = 4096


def chunk_weights(size: int, chunk_kb: int) -> int:
    """Weights in a chunk: also a small model goes in some sixteen, so that two exchanges hardly ever overlap in one.

    Args:
        size: Weights in all.
        chunk_kb: KiB of a chunk in fp32 at most.
    """
    return max(1, min(size, chunk_kb * 256, max(_LEAST, -(-size // _CHUNKS))))


class Wire:
    """Converts chunks of up to a given number of weights; not for several threads."""

    def __init__(self, kind: WireKind, longest: int) -> None:
        self.kind = kind
        self.itemsize = 2 if kind == "bf16" else 4
        self._rounded = np.zeros(longest, np.uint32)
        # the low halves stay zero for ever: a decoded chunk is written by its high halves
        self._decoded = np.zeros((2, longest), np.float32)

    @np.errstate(over="ignore", invalid="ignore")
    def encode(self, values: Floats, out: Buffer) -> None:
        """Write values to a buffer of `len(values) * itemsize` bytes."""
        if self.kind == "fp32":
            np.frombuffer(out, np.float32)[:] = values
            return
        rounded = self._rounded[: len(values)]
        np.add(values.view(np.uint32), 0x8000, out=rounded)
        halves = np.frombuffer(out, np.uint16)
        halves[:] = rounded.view(np.uint16)[1::2]
        if not np.isfinite(values.dot(values)):  # rounding as integers can turn a NaN into a number
            halves[np.isnan(values)] = 0x7FC0

    def decode(self, raw: Buffer, place: int = 0) -> Floats:
        """Values of a buffer: a view of it for fp32, else a view of scratch memory.

        Args:
            raw: The buffer.
            place: Which scratch memory, 0 or 1; valid until the same place is used again.
        """
        if self.kind == "fp32":
            return np.frombuffer(raw, np.float32)
        halves: NDArray[np.uint16] = np.frombuffer(raw, np.uint16)
        values = self._decoded[place, : len(halves)]
        values.view(np.uint16)[1::2] = halves
        return values
