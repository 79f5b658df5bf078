"""Detects truncated audio files by their headers, for the formats in which libsndfile does not check.

libsndfile rejects truncated FLAC files, and MP3 files whose first frame contains the frame count. For a truncated WAV,
RF64, W64, AIFF, CAF, AU, SPHERE or Ogg file it silently returns what is left; training such audio with the full
transcript does harm. A program that writes into a pipe must leave the length open: then there is nothing to compare,
and the file is accepted.
"""

import io
import math
from pathlib import Path
from typing import BinaryIO, Literal

_OPEN_SIZE = 0x7FFF0000
"""32-bit sizes from here on mean "unknown": FFmpeg writes 0xFFFFFFFF into a pipe, SoX 0x7FFFF000."""
_MOST_CHUNKS = 1024
_OGG_TAIL = 27 + 255 + 255 * 255 + 4096
"""Bytes to search from the end: the longest page, plus what taggers append after the last page."""
_PAGE_HEADER = 27  # bytes, before the table of the lengths of a page's segments
_FIRST_PAGE, _LAST_PAGE = 2, 4
_W64_RIFF = b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb"


def announced_times(source: bytes | str | Path) -> float:
    """Ratio of the audio length that the header announces to the length that the file contains.

    Returns:
        1 if the file is complete, or if its format or header does not tell; more than 1 if it is truncated; infinity if
        it is truncated and its full length is unknown, or no audio is left.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        head = file.read(16)
        if head[:4] == b"OggS":
            return 1.0 if _ogg_has_its_end(file, size) else math.inf
        begin, length = _audio_range(file, head)
    held = size - begin
    if length <= held:
        return 1.0
    return length / held if held > 0 else math.inf


def has_chained_streams(source: bytes | str | Path) -> bool:
    """Whether an Ogg file has several streams one after another (RFC 3533, section 4).

    Recorders that are paused, web radio and `cat a.ogg b.ogg` make such files; libsndfile reads the first stream only.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file:
        begun = False
        while len(header := file.read(_PAGE_HEADER)) == _PAGE_HEADER and header.startswith(b"OggS"):
            first = bool(header[5] & _FIRST_PAGE)
            if first and begun:
                return True
            begun = begun or not first
            file.seek(sum(file.read(header[26])), io.SEEK_CUR)
    return False


def bytes_without_length(source: bytes | str | Path) -> int:
    """Bytes that follow the header of a WAV file that announces none, as of an interrupted recorder; otherwise 0."""
    with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        head = file.read(16)
        if head[:4] not in (b"RIFF", b"RIFX"):
            return 0
        place, length = _audio_range(file, head)
        file.seek(max(place - 4, 0))
        return size - place if place and not length and file.read(4) == bytes(4) else 0


def _audio_range(file: BinaryIO, head: bytes) -> tuple[int, int]:
    """Offset and announced size of the audio in bytes; size 0 if the header leaves it open."""
    if head[:4] in (b"RIFF", b"RIFX", b"RF64"):
        return _riff_range(file, "big" if head[:4] == b"RIFX" else "little", b"data")
    if head[:4] == b"FORM":
        return _riff_range(file, "big", b"SSND")
    if head[:12] == _W64_RIFF:
        return _w64_range(file)
    if head[:4] == b"caff":
        return _caf_range(file)
    if head[:4] == b".snd":
        return int.from_bytes(head[4:8], "big"), _known(int.from_bytes(head[8:12], "big"))
    if head[:7] == b"NIST_1A":
        return _sphere_range(file)
    return 0, 0


def _known(length: int) -> int:
    return length if length < _OPEN_SIZE else 0


def _riff_range(file: BinaryIO, order: Literal["big", "little"], audio: bytes) -> tuple[int, int]:
    """Audio chunk of RIFF (WAV, RF64) and FORM (AIFF); RF64 stores lengths over 32 bits in the chunk `ds64`."""
    place, long_length = 12, 0
    for _ in range(_MOST_CHUNKS):
        file.seek(place)
        header = file.read(8)
        if len(header) < 8:
            break
        length = int.from_bytes(header[4:], order)
        if header[:4] == audio:
            return place + 8, long_length if length == 0xFFFFFFFF and long_length else _known(length)
        if header[:4] == b"ds64":
            # 64 bits each: size of the file, size of the audio; all bits set if unknown
            long_length = int.from_bytes(file.read(16)[8:], "little") & ~(-1 << 63)
            long_length = 0 if long_length >= (1 << 63) - 1 else long_length
        place += 8 + length + length % 2
    return 0, 0


def _w64_range(file: BinaryIO) -> tuple[int, int]:
    """Sony's Wave64: chunks have 16-byte names, 64-bit lengths that include the header, and 8-byte alignment."""
    place = 40
    for _ in range(_MOST_CHUNKS):
        file.seek(place)
        header = file.read(24)
        length = int.from_bytes(header[16:], "little")
        if len(header) < 24 or length < 24:
            break
        if header[:4] == b"data":
            return place + 24, 0 if length >= 1 << 62 else length - 24
        place += length + -length % 8
    return 0, 0


def _caf_range(file: BinaryIO) -> tuple[int, int]:
    """Apple's Core Audio: chunks with 64-bit lengths (-1: unknown); four bytes precede the samples."""
    place = 8
    for _ in range(_MOST_CHUNKS):
        file.seek(place)
        header = file.read(12)
        length = int.from_bytes(header[4:], "big", signed=True)
        if len(header) < 12 or length < 0 or header[:4] == b"data":
            return (place + 16, max(length - 4, 0)) if header[:4] == b"data" else (0, 0)
        place += 12 + length
    return 0, 0


def _sphere_range(file: BinaryIO) -> tuple[int, int]:
    """NIST SPHERE: a text header of lines `name -type value`; its second line is the size of the header."""
    file.seek(0)
    lines = file.read(1024).decode("ascii", "replace").splitlines()
    fields = {words[0]: words[2] for line in lines[2:] if len(words := line.split()) == 3}
    try:
        begin = int(lines[1])
        sizes = [int(fields[name]) for name in ("sample_count", "channel_count", "sample_n_bytes")]
    except (KeyError, ValueError, IndexError):
        return 0, 0
    packed = fields.get("sample_coding", "pcm").lower() not in ("pcm", "ulaw", "mu-law", "alaw")
    return begin, 0 if packed or min(sizes) < 0 else math.prod(sizes)


def _ogg_has_its_end(file: BinaryIO, size: int) -> bool:
    """Whether the last page is complete and marked as the last of its stream (RFC 3533, section 6)."""
    begin = max(0, size - _OGG_TAIL)
    file.seek(begin)
    tail = file.read()
    place = len(tail)
    while (place := tail.rfind(b"OggS", 0, place)) >= 0:
        page = tail[place:]
        if len(page) >= 27 and (page[4] != 0 or page[5] > 7):
            continue  # not a page header: "OggS" occurs within the audio data
        lengths = page[27 : 27 + page[26]] if len(page) > 27 else b""
        whole = len(page) > 27 and len(lengths) == page[26] and len(page) >= 27 + len(lengths) + sum(lengths)
        return whole and bool(page[5] & _LAST_PAGE)
    return False
