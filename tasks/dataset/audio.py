"""Loads the audio of an utterance: a file, a segment of a long recording, or a member of a tar."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from configurable.lazy import torch
from speech.audio import AudioError, decode_samples
from speech.flac import is_whole, read_header
from storage.corpora import Utterance
from storage.corpora.base import is_file
from storage.corpora.embedded import CellError, read_cell

if TYPE_CHECKING:
    from torch import Tensor

_MAX_MEMBER = 1 << 28
_MAX_EXTRA = 1 << 14
"""Maximum bytes besides the audio (tags, seek table) in a FLAC file that is copied into a shard."""
_RAW = {".raw": 16000}
"""Suffixes of audio without a header (16-bit, little-endian, one channel), with the default sample rate in Hz."""


def load_utterance_audio(source: Utterance | Mapping[str, Any]) -> tuple[Tensor, int]:
    """Load the audio of an utterance as a tensor; arguments and errors are those of `load_utterance_samples`."""
    samples, rate = load_utterance_samples(source)
    return torch.from_numpy(samples), rate


def load_utterance_samples(
    source: Utterance | Mapping[str, Any], *, max_seconds: float = math.inf
) -> tuple[NDArray[np.float32], int]:
    """Load the audio of an utterance or of a row of the manifest.

    Only the segment of a long recording is decoded; only the member of a tar or the cell of a table is read.

    Args:
        source: `audio`, `start`, `end`, `channel`, and `offset` and `length` if the audio is a range of bytes, or
            `row` and `column` if it is in a Parquet file.
        max_seconds: Longest accepted utterance: a longer one is refused before it fills the memory.

    Returns:
        The waveform, float32 `[num_samples]` in [-1, 1], and its sample rate in Hz.

    Raises:
        AudioError: If the audio is missing, damaged, empty or too long.
    """
    row: Mapping[str, Any] = vars(source) if isinstance(source, Utterance) else source
    path, offset, length = row["audio"], row.get("offset"), row.get("length")
    raw_rate = None
    if (suffix := Path(path).suffix.lower()) in _RAW:
        raw_rate = row.get("sample_rate") or _RAW[suffix]
    if row.get("row") is not None:
        encoded = _cell(path, row["column"], int(row["row"]))
    else:
        encoded = path if offset is None or length is None else read_range(path, int(offset), int(length))
    start, end, channel = row["start"], row["end"], row["channel"]
    return decode_samples(encoded, start=start, end=end, channel=channel, raw_rate=raw_rate, max_seconds=max_seconds)


def _cell(path: str, column: str, row: int) -> bytes:
    """The audio in a Parquet file.

    Raises:
        AudioError: If it cannot be read, or is larger than any utterance.
    """
    try:
        content = read_cell(path, column, row)
    except CellError as error:
        raise AudioError(str(error), "unreadable") from error
    if len(content) > _MAX_MEMBER:
        raise AudioError(f"row {row} of {path!r}: an utterance has at most {_MAX_MEMBER} bytes", "unreadable")
    return content


def untouched_flac(source: Mapping[str, Any], rate: int) -> tuple[bytes, int] | None:
    """The bytes of a FLAC file that a shard can use unchanged, and its number of samples.

    Args:
        source: A row of the manifest.
        rate: Sample rate of the shard, Hz.

    Returns:
        None if the audio must be changed, because it is a segment or one of several channels, has another rate or bit
        depth, or the file contains large metadata; or if the file differs from the manifest, truncated or replaced.
    """
    path = source["audio"]
    whole = not source["start"] and source["end"] is None and not source["channel"] and source.get("offset") is None
    if not whole or source["sample_rate"] != rate or not path.lower().endswith(".flac"):
        return None
    try:
        if not is_file(Path(path)) or Path(path).stat().st_size > 2 * source["duration"] * rate + _MAX_EXTRA:
            return None
        content = Path(path).read_bytes()
    except OSError:
        return None
    info = read_header(content)
    if info is None or (info.sample_rate, info.channels, info.bits) != (rate, 1, 16):
        return None
    same = abs(info.num_samples - source["duration"] * rate) < 0.5
    small = info.header_bytes <= _MAX_EXTRA and len(content) <= 2 * info.num_samples + _MAX_EXTRA
    return (content, info.num_samples) if same and small and is_whole(content, info) else None


def read_range(path: str, offset: int, length: int) -> bytes:
    """Read a range of bytes from a file.

    Raises:
        AudioError: If the file is missing or too short, or the range is larger than any utterance.
    """
    place = f"bytes {offset} to {offset + length} of {path!r}"
    if offset < 0 or not 0 < length <= _MAX_MEMBER:
        raise AudioError(
            f"{place}: an utterance has 1 to {_MAX_MEMBER} bytes", "empty" if length == 0 else "unreadable"
        )
    try:
        with Path(path).open("rb") as file:
            file.seek(offset)
            content = file.read(length)
    except OSError as error:
        raise AudioError(f"{place} cannot be read: {error.strerror or error}", "unreadable") from error
    if len(content) < length:
        raise AudioError(f"{place}: the file is shorter than that: fetch it again", "unreadable")
    return content
