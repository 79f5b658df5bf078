"""Messages between exchanges: a header, and the bytes of one chunk of weights."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from training.exchange.mailbox import Floats

WireKind = Literal["fp32", "bf16"]
Buffer = Any  # any object with the buffer protocol

_FORMAT = struct.Struct("<4s4B3I3Q")
_MAGIC = b"STX2"

AVERAGE, FETCH, AGREE, REPLICA, RELEASE = 1, 2, 3, 4, 5
OK, NOT_READY, MISMATCH, OUTDATED, CROSSED, WAITING, UNREADABLE = 0, 1, 2, 3, 4, 5, 6
_WIRES: tuple[WireKind, ...] = ("fp32", "bf16")

MEANING: dict[int, Literal["not ready", "other weights", "outdated", "cannot read the weights on the GPU"]] = {
    NOT_READY: "not ready",
    MISMATCH: "other weights",
    OUTDATED: "outdated",
    UNREADABLE: "cannot read the weights on the GPU",
}
"""Meaning of the refusals. `CROSSED` is not a refusal: both sides asked for the same chunk at the same time. Nor is
`WAITING`: a replica is being written, ask again."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a message.

    Attributes:
        kind: `AVERAGE`; `FETCH`, the current weights, always fp32; `REPLICA`, weights and optimizer state of one step,
            also fp32 (the request contains the optimizer's name); `AGREE`, the agreement on the keys of a session; or
            `RELEASE`: the asker has read the answer, which it sends back, from the answerer's memory.
        wire: Encoding of the chunk.
        status: Status of an answer.
        last: Whether this is the exchange's last chunk.
        node: The sender's node number.
        chunk: Number of weights in a full chunk.
        index: Index of the chunk.
        token: Chosen by the asker, returned in the answer.
        view: Number of the sender's view.
        size: Total number of weights, or of values in a replica.
    """

    kind: int
    wire: WireKind
    status: int
    last: bool
    node: int
    chunk: int
    index: int
    token: int
    view: int
    size: int

    def pack(self) -> bytes:
        """Encode the header."""
        flags = (self.kind, _WIRES.index(self.wire), self.status, self.last)
        return _FORMAT.pack(_MAGIC, *flags, self.node, self.chunk, self.index, self.token, self.view, self.size)


def unpack(data: bytes | memoryview) -> Header | None:
    """Decode a header from untrusted bytes; None if it is invalid."""
    if len(data) != _FORMAT.size:
        return None
    magic, kind, wire, status, last, *numbers = _FORMAT.unpack(data)
    if magic != _MAGIC or kind not in (AVERAGE, FETCH, AGREE, REPLICA, RELEASE) or wire >= len(_WIRES):
        return None
    return Header(kind, _WIRES[wire], status, bool(last), *numbers)


# --- weights as bytes


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
    """Encodes and decodes chunks of up to `longest` weights: fp32, or bf16 rounded to nearest; little-endian.

    Not thread-safe.
    """

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


# --- memory


class MemoryPool:
    """Allocates memory for messages and takes it back once they are answered; never holds more than was in use at once.

    Args:
        allocate: Allocates memory, given its size in bytes.
    """

    def __init__(self, allocate: Callable[[int], Buffer]) -> None:
        self._allocate = allocate
        self._spare: list[Buffer] = []

    def take(self, length: int) -> Buffer:
        """Memory of this length; spare memory of another length, such as that of a model's last chunk, is freed."""
        while self._spare:
            if len(spare := self._spare.pop()) == length:
                return spare
        return self._allocate(length)

    def give_back(self, memory: Buffer) -> None:
        """Allow reuse of a message's memory, after an answer proves that the message was sent in full."""
        self._spare.append(memory)
