"""Weights as bytes: fp32, or bf16 rounded to nearest; little-endian."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from training.exchange.mailbox import Floats

WireKind = Literal["fp32", "bf16"]
Buffer = Any  # any object with the buffer protocol


_CHUNKS = 16
_LEAST = 4096


def chunk_weights(size: int, chunk_kb: int) -> int:
    """Number of weights per chunk.

    Small models are split into about sixteen chunks, too, so that two exchanges rarely need the same chunk at once.

    Args:
        size: Total number of weights.
        chunk_kb: Maximum size of a chunk in fp32, in KiB.
    """
    return max(1, min(size, chunk_kb * 256, max(_LEAST, -(-size // _CHUNKS))))


class Wire:
    """Encodes and decodes chunks of up to `longest` weights; not thread-safe."""

    def __init__(self, kind: WireKind, longest: int) -> None:
        self.kind = kind
        self.itemsize = 2 if kind == "bf16" else 4
        self._rounded = np.zeros(longest, np.uint32)
        # the low halves always stay zero: decoding writes only the high halves
        self._decoded = np.zeros((2, longest), np.float32)

    @np.errstate(over="ignore", invalid="ignore")
    def encode(self, values: Floats, out: Buffer) -> None:
        """Encode values into a buffer of `len(values) * itemsize` bytes."""
        if self.kind == "fp32":
            np.frombuffer(out, np.float32)[:] = values
            return
        rounded = self._rounded[: len(values)]
        np.add(values.view(np.uint32), 0x8000, out=rounded)
        halves = np.frombuffer(out, np.uint16)
        halves[:] = rounded.view(np.uint16)[1::2]
        if not np.isfinite(values.dot(values)):  # integer rounding can turn a NaN into a number
            halves[np.isnan(values)] = 0x7FC0

    def decode(self, raw: Buffer, place: int = 0) -> Floats:
        """Decode a buffer: returns a view of it for fp32, else a view of scratch memory.

        Args:
            raw: The buffer.
            place: Which scratch memory to use, 0 or 1; the result is valid until its next use.
        """
        if self.kind == "fp32":
            return np.frombuffer(raw, np.float32)
        halves: NDArray[np.uint16] = np.frombuffer(raw, np.uint16)
        values = self._decoded[place, : len(halves)]
        values.view(np.uint16)[1::2] = halves
        return values
