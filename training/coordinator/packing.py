"""Rows and masks of the index as short strings, for messages, events and checkpoints."""

import base64
import zlib
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

Rows = NDArray[np.int64]
MAX_MESSAGE = 256 * 1024 * 1024
"""Maximum size of a message in bytes, and of what a string in it unpacks to; the largest is a lease of an epoch."""


class PackingError(ValueError):
    """A string does not encode rows or a mask."""


def pack_rows(rows: Rows) -> str:
    """Encode row numbers as text: deflated differences; ascending rows take well under a byte each."""
    differences = np.diff(np.asarray(rows, dtype=np.int64), prepend=0).astype("<i4")
    return base64.b64encode(zlib.compress(differences.tobytes(), 1)).decode()


def unpack_rows(text: str) -> Rows:
    """Inverse of `pack_rows`.

    Raises:
        PackingError: If the text is not a valid encoding.
    """
    data = _inflate(text)
    if len(data) % 4:
        raise PackingError("packed rows are damaged")
    return np.cumsum(np.frombuffer(data, dtype="<i4"), dtype=np.int64)


def pack_bits(bits: NDArray[np.bool_]) -> str:
    """Encode a mask as text."""
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 6)).decode()


def unpack_bits(text: str, count: int) -> NDArray[np.bool_]:
    """Inverse of `pack_bits`: a mask [count].

    Raises:
        PackingError: If the text does not encode a mask of that length.
    """
    octets = np.frombuffer(_inflate(text), dtype=np.uint8)
    if len(octets) != (count + 7) // 8:
        raise PackingError(
            f"a mask of {len(octets)} bytes where {count} rows were expected: does it belong to another index?"
        )
    return np.unpackbits(octets, count=count).astype(np.bool_)


def _inflate(text: str) -> bytes:
    try:
        expand = zlib.decompressobj()
        data = expand.decompress(base64.b64decode(text, validate=True), MAX_MESSAGE)
    except (ValueError, zlib.error) as error:
        raise PackingError(f"packed rows are damaged ({error})") from error
    if expand.unconsumed_tail or not expand.eof:
        raise PackingError("packed rows are damaged or too long")
    return data


def _checked(text: str) -> str:
    unpack_rows(text)
    return text


PackedRows = Annotated[str, AfterValidator(_checked)]
"""Field of a message: row numbers as `pack_rows` encodes them."""
