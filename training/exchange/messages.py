"""The messages between exchanges: a header, and the bytes of one chunk of weights."""

import struct
from dataclasses import dataclass
from typing import Literal

from training.exchange.wire import WireKind

_FORMAT = struct.Struct("<4s4B3I3Q")
_MAGIC = b"STX2"

AVERAGE, FETCH, AGREE, REPLICA = 1, 2, 3, 4
OK, NOT_READY, MISMATCH, OUTDATED, CROSSED, WAITING = 0, 1, 2, 3, 4, 5
_WIRES: tuple[WireKind, ...] = ("fp32", "bf16")

MEANING: dict[int, Literal["not ready", "other weights", "outdated"]] = {
    NOT_READY: "not ready",
    MISMATCH: "other weights",
    OUTDATED: "outdated",
}
"""What refusals mean. `CROSSED` is none: both sides asked each other for the same chunk at a time. Nor is `WAITING`: a
replica is being written, ask again."""


@dataclass(frozen=True, slots=True)
class Header:
    """What goes before a chunk.

    Attributes:
        kind: `AVERAGE`; `FETCH`, the weights as they are, always fp32; `REPLICA`, weights and optimizer state of one
            step, fp32 too (a request brings the optimizer's name); or `AGREE` (on the keys of a session).
        wire: How the chunk is encoded.
        status: Of an answer.
        last: Whether the exchange's last chunk.
        node: The sender's number.
        chunk: Weights in a full chunk.
        index: Which chunk.
        token: Chosen by the asker, returned by the answerer.
        view: Number of the sender's view.
        size: Weights in all, or values of a replica.
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
        """As bytes."""
        flags = (self.kind, _WIRES.index(self.wire), self.status, self.last)
        return _FORMAT.pack(_MAGIC, *flags, self.node, self.chunk, self.index, self.token, self.view, self.size)


def unpack(data: bytes | memoryview) -> Header | None:
    """A header from bytes that anyone may have sent; None if it is none."""
    if len(data) != _FORMAT.size:
        return None
    magic, kind, wire, status, last, *numbers = _FORMAT.unpack(data)
    if magic != _MAGIC or kind not in (AVERAGE, FETCH, AGREE, REPLICA) or wire >= len(_WIRES):
        return None
    return Header(kind, _WIRES[wire], status, bool(last), *numbers)
