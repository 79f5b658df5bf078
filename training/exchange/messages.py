"""Messages between exchanges: a header, and the bytes of one chunk of weights."""

import struct
from dataclasses import dataclass
from typing import Literal

from training.exchange.wire import WireKind

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
