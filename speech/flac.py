"""Reads the header of a FLAC file, and checks that the file is complete, without decoding it (RFC 9639).

Copying a file is a hundred times cheaper than decoding it, but a truncated file still has a valid header. Therefore the
last frame is checked: its CRC-16 must match, and it must end with the last sample that the header announces.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MAX_FRAME = 1 << 14
"""Longest last frame in bytes; files with a longer one (many channels and bits) count as incomplete."""
_BLOCK_SIZES = {1: 192, **{2 + k: 576 << k for k in range(4)}, **{8 + k: 256 << k for k in range(8)}}


@dataclass(frozen=True)
class FlacInfo:
    """The stream header: rate in Hz, channels, bits per sample, number of samples, bytes before the audio."""

    sample_rate: int
    channels: int
    bits: int
    num_samples: int
    header_bytes: int


def read_header(data: bytes) -> FlacInfo | None:
    """Read the stream header; None if this is not FLAC or the length is missing (RFC 9639, section 8)."""
    if data[:4] != b"fLaC" or len(data) < 42 or data[4] & 0x7F != 0 or int.from_bytes(data[5:8], "big") != 34:
        return None
    place, last = 4, False
    while not last:
        if place + 4 > len(data):
            return None
        last = bool(data[place] & 0x80)
        place += 4 + int.from_bytes(data[place + 1 : place + 4], "big")
    if place >= len(data):
        return None
    packed = int.from_bytes(data[18:26], "big")
    samples = packed & ((1 << 36) - 1)
    channels, bits = ((packed >> 41) & 7) + 1, ((packed >> 36) & 31) + 1
    return FlacInfo(packed >> 44, channels, bits, samples, place) if samples else None


def is_whole(data: bytes, info: FlacInfo) -> bool:
    """Whether a FLAC file ends with an undamaged frame that contains its last sample (RFC 9639, section 9)."""
    end = len(data)
    floor = max(info.header_bytes, end - _MAX_FRAME)
    place = end
    while (place := data.rfind(b"\xff", floor, place)) >= 0:
        if place + 6 < end and data[place + 1] in (0xF8, 0xF9) and _ends_at(data, place) == info.num_samples:
            frame = np.frombuffer(data, np.uint8, end - place - 2, place)
            if _crc16(frame) == int.from_bytes(data[end - 2 :], "big"):
                return True
    return False


def _ends_at(data: bytes, place: int) -> int:
    """Number of samples up to the end of the frame whose header is at `place`; 0 if there is no frame header."""
    varies = data[place + 1] == 0xF9
    size_code = data[place + 2] >> 4
    number, after = _coded_number(data, place + 4)
    if number < 0:
        return 0
    extra = {6: 1, 7: 2}.get(size_code, 0)
    size = int.from_bytes(data[after : after + extra], "big") + 1 if extra else _BLOCK_SIZES.get(size_code, 0)
    after += extra + {12: 1, 13: 2, 14: 2}.get(data[place + 2] & 15, 0)
    if not size or after >= len(data) or _crc8(data[place:after]) != data[after]:
        return 0
    if varies:
        return number + size
    # streams with a fixed block size number their frames; only the last frame may be shorter
    block = int.from_bytes(data[8:10], "big")
    return number * block + size


def _coded_number(data: bytes, place: int) -> tuple[int, int]:
    """The frame or sample number at `place` (coded like UTF-8) and where it ends; −1 if it is invalid."""
    first = data[place] if place < len(data) else 0xFF
    if first < 0x80:
        return first, place + 1
    length = 8 - (first ^ 0xFF).bit_length()
    rest = data[place + 1 : place + length]
    if not 2 <= length <= 7 or len(rest) != length - 1 or any(byte & 0xC0 != 0x80 for byte in rest):
        return -1, place
    value = first & ((1 << (7 - length)) - 1)
    for byte in rest:
        value = value << 6 | byte & 0x3F
    return value, place + length


@lru_cache(maxsize=1)
def _crc8_table() -> bytes:
    """Table of the CRC with polynomial x^8 + x^2 + x + 1."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte << 1) ^ (0x107 if byte & 0x80 else 0)
        table.append(byte)
    return bytes(table)


def _crc8(data: bytes) -> int:
    table, crc = _crc8_table(), 0
    for byte in data:
        crc = table[crc ^ byte]
    return crc


@lru_cache(maxsize=1)
def _crc16_tables() -> NDArray[np.uint16]:
    """Contribution of each byte value if 0 to _MAX_FRAME - 1 bytes follow it [_MAX_FRAME, 256]; a CRC is linear.

    The polynomial is x^16 + x^15 + x^2 + 1.
    """
    row = np.arange(256, dtype=np.uint32) << 8
    for _ in range(8):
        row = (row << 1) ^ np.where(row & 0x8000, 0x18005, 0)
    tables = np.empty((_MAX_FRAME, 256), dtype=np.uint16)
    tables[0] = row
    for number in range(1, _MAX_FRAME):
        before = tables[number - 1]
        tables[number] = (before << 8) ^ tables[0][before >> 8]
    return tables


def _crc16(data: NDArray[np.uint8]) -> int:
    tables = _crc16_tables()
    if len(data) > len(tables):
        return -1
    return int(np.bitwise_xor.reduce(tables[np.arange(len(data) - 1, -1, -1), data]))
