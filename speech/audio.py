"""Waveforms: decoding, resampling, FLAC encoding, levels.

Decoding uses soundfile, which needs no system library and reads FLAC, WAV, MP3, Ogg Vorbis and Opus from bytes as well
as from files. A waveform is a single-channel float32 tensor `[num_samples]` between -1 and 1.
"""

from __future__ import annotations

import codecs
import io
import math
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import numpy as np
import soundfile
from numpy.typing import NDArray
from typing_extensions import override

from configurable.lazy import torch, torchaudio
from speech.truncation import announced_times, bytes_without_length, has_chained_streams

if TYPE_CHECKING:
    from torch import Tensor


SILENCE_DB = -120.0
"""Level of digital silence in `level_db`; finite, so that JSON and Parquet can store it."""
_LONGEST_NAME = 400  # characters of a name in messages; a longer one was probably meant to be the content of a file
_BLOCK_SAMPLES = 1 << 20  # read in blocks: a header may claim any length, so memory must follow the actual data
MAX_SAMPLES = 1 << 29
"""Maximum length of a waveform in samples, nine hours at 16 kHz: a small file of silence may decode to very many."""
RATES_HZ = (1_000, 768_000)
"""Smallest and largest accepted sample rate: beyond them a header is wrong, and a short file may fill the memory."""
_MAX_TERM = 2_000
"""Largest term of the ratio of two rates in `resample`: the filters have at most about its square of coefficients."""
_OPPOSITE = -0.7
"""Correlation of two channels up to which one of them counts as inverted."""
_CANCELLED = 0.5
"""Power of the sum of channels, relative to that of independent ones, below which inverted channels are looked for."""
MAX_AMPLITUDE = 64.0
"""Largest accepted sample, 36 dB above full scale; beyond that, samples are unscaled integers or damaged."""
_INT16_SCALE = 32768
_PIPE_BYTES = 1 << 16
NO_END = 1 << 62
"""Frames of audio whose end is not known; libsndfile gives the largest integer."""
_OPEN_BYTES = 0x7FFF_0000
"""Lengths of WAV data above this mean that it was not known when the header was written."""
_LARGEST_CHUNK = 1 << 20
"""Bytes of a WAV header's part that is read: a larger one is damaged."""
_PCM16 = ((1, 16), (0xFFFE, 16))
"""Format and bits of 16-bit PCM in a WAV header, plain and extensible."""
_HEAD = 512  # bytes inspected to distinguish text from audio
_MAGIC = (b"RIFF", b"RIFX", b"RF64", b"OggS", b"fLaC", b"ID3", b"FORM", b".snd", b"NIST", b"caff", b"Creative Voice")
_OPUS_PREROLL_S = 1.0
"""Audio decoded and discarded after a seek in Opus, so that the result equals that of one pass. RFC 7845, section 4.6,
requires at least 80 ms; SILK's long-term prediction needs more on loud noise."""
_ROUNDING_S = 0.01
"""Excess of the announced length over the actual one that is attributed to inexact headers, not to truncation."""

AudioErrorReason = Literal["unreadable", "empty", "too-long"]


class AudioError(ValueError):
    """Audio that cannot be decoded or encoded.

    Attributes:
        reason: "unreadable" (damaged, truncated, unknown format, invalid samples, impossible sample rate, no such
            channel), "empty" (no samples), or "too-long" (longer than the caller accepts).
    """

    def __init__(self, message: str, reason: AudioErrorReason) -> None:
        super().__init__(message)
        self.reason: AudioErrorReason = reason


def decode_audio(
    source: bytes | str | Path,
    *,
    start: float = 0.0,
    end: float | None = None,
    channel: int | None = None,
    max_seconds: float = math.inf,
) -> tuple[Tensor, int]:
    """Decode a file, or a segment of it, to a tensor; arguments and errors are those of `decode_samples`."""
    samples, rate = decode_samples(source, start=start, end=end, channel=channel, max_seconds=max_seconds)
    return torch.from_numpy(samples), rate


def decode_samples(
    source: bytes | str | Path,
    *,
    start: float = 0.0,
    end: float | None = None,
    channel: int | None = None,
    raw_rate: int | None = None,
    max_seconds: float = math.inf,
) -> tuple[NDArray[np.float32], int]:
    """Decode a file, or a segment of it, to one channel; torch is imported only to average several.

    Segments are sample-accurate in all formats. The decoder seeks to the start and skips the audio before it, except
    for one second in Opus. Each call reopens the file: decoded MP3 differs in the last bit depending on earlier reads,
    and a waveform must depend on its source only.

    Args:
        source: the encoded bytes, or a local path.
        start: start of the segment in seconds.
        end: end of the segment in seconds; None, or a time beyond the end, means the end of the file.
        channel: channel to use, counted from 0; None averages all channels, inverted ones with their sign changed.
        raw_rate: sample rate of headerless audio (16-bit, little-endian, one channel); None reads the header.
        max_seconds: longest accepted segment: a longer one is refused before it fills the memory.

    Returns:
        The waveform, float32 `[num_samples]` in [-1, 1], and its sample rate in Hz.

    Raises:
        AudioError: the audio is damaged, has invalid samples or an impossible rate, or lacks the channel; the segment
            is empty or too long, or reaches the end of a truncated file.
    """
    name = _name_of(source)
    end = None if end == math.inf else end
    if not 0 <= start < math.inf or (end is not None and not end > start):  # not a number, either
        raise AudioError(f"{name}: the segment from {start} s to {end} s has no duration", "empty")
    with _explained(source), _open(source, raw_rate) as file:
        rate = check_rate(int(file.samplerate), name)
        if raw_rate is None and (end is None or round(end * rate) > file.frames):
            _check_whole(source, file, name)
        samples = _read_segment(file, start, end, channel, name, max_seconds)
        integers = file.subtype.startswith("PCM_")
    if not len(samples):
        raise _no_sample(source, name, f" between {start} s and {'its end' if end is None else end}")
    if not integers:
        check_samples(samples, name)
    return samples, rate


def stream_audio(source: bytes | str | Path) -> Iterator[tuple[Tensor, int]]:
    """Decode a file of any length block by block, averaging all channels; keeps one block in memory.

    The concatenated blocks equal the result of `decode_audio`.

    Args:
        source: the encoded bytes, or a local path.

    Yields:
        Blocks, float32 `[num_samples]` in [-1, 1], and the sample rate in Hz.

    Raises:
        AudioError: as in `decode_audio`; for a truncated FLAC or MP3 file only when its end is reached.
    """
    name = _name_of(source)
    with _explained(source), _open(source, None) as file:
        rate, left = check_rate(int(file.samplerate), name), file.frames
        _check_whole(source, file, name)
        if left <= 0:
            raise _no_sample(source, name)
        while left > 0:
            block = torch.from_numpy(file.read(min(left, _block(file)), dtype="float32", always_2d=True))
            if not len(block):
                break
            left -= len(block)
            check_samples(block, name)
            yield _to_mono(block), rate
        if left == file.frames:  # some codings, such as GSM, do not tell where in the file it is
            raise AudioError(f"{name} has no sample", "empty")
        if left > 0 and file.frames < NO_END:
            raise AudioError(f"{name} is truncated: {left} of {file.frames} samples are missing", "unreadable")


def stream_pcm(file: BinaryIO, raw_rate: int) -> Iterator[tuple[Tensor, int]]:
    """Read audio while it is written, such as a microphone's through a pipe: 16-bit PCM, or a WAV file of it.

    Args:
        file: Open for reading; a block is what is there.
        raw_rate: Sample rate of audio without a header (little-endian, one channel).

    Yields:
        Blocks, float32 `[num_samples]` in [-1, 1], and the sample rate in Hz.

    Raises:
        AudioError: There is no sample, or a header announces another coding.
    """
    name, rate, channels, left = "standard input", raw_rate, 1, NO_END
    rest = file.read(12)
    if rest.startswith(_MAGIC):
        rate, channels, left = _pcm_header(file, rest, name)
        rest = b""
    read = getattr(file, "read1", file.read)  # what is there now, not a full block
    size, any_samples, more = 2 * channels, False, True
    while more and left > 0:
        block = read(_PIPE_BYTES)
        more, rest = bool(block), (rest + block)[:left]
        whole = len(rest) // size * size
        samples = torch.from_numpy(np.frombuffer(rest[:whole], dtype="<i2").astype(np.float32) / _INT16_SCALE)
        rest, left, any_samples = rest[whole:], left - whole, any_samples or whole > 0
        if whole:
            yield _to_mono(samples.view(-1, channels)), check_rate(rate, name)
        elif len(rest) == left:  # part of a sample
            break
    if not any_samples:
        raise AudioError(f"{name} has no sample", "empty")


def _pcm_header(file: BinaryIO, start: bytes, name: str) -> tuple[int, int, int]:
    """Read a WAV file's header after its first 12 bytes: sample rate in Hz, channels, bytes of samples.

    Raises:
        AudioError: The file is no WAV file of 16-bit PCM.
    """
    form = coding = 0
    rate = channels = 0
    if start.startswith(b"RIFF") and start.endswith(b"WAVE"):
        while len(head := file.read(8)) == 8:
            kind, size = struct.unpack("<4sI", head)
            if kind == b"data" and (form, coding) in _PCM16 and channels:
                # the length is not known before the end: recorders write 0 or a very large one
                return rate, channels, size if 0 < size < _OPEN_BYTES else NO_END
            if kind == b"data" or size > _LARGEST_CHUNK:
                break
            body = file.read(size + size % 2)
            if kind == b"fmt " and len(body) >= 16:
                form, channels, rate, _, _, coding = struct.unpack("<HHIIHH", body[:16])
    raise AudioError(
        f"{name} is no WAV file of 16-bit PCM: convert it (ffmpeg -i - -f wav -c:a pcm_s16le -), or give a file's name",
        "unreadable",
    )


def check_samples(samples: Tensor | NDArray[np.float32], name: str) -> None:
    """Check that samples are finite and not far beyond full scale.

    Args:
        samples: A waveform of any shape, full scale at 1.
        name: Name of the audio in error messages.

    Raises:
        AudioError: A sample is not finite, or its magnitude exceeds `MAX_AMPLITUDE`.
    """
    magnitudes: Any = abs(samples)
    peak = float(magnitudes.max()) if math.prod(samples.shape) else 0.0  # NaN if any sample is NaN
    if not math.isfinite(peak):
        raise AudioError(f"{name} has samples that are not finite numbers: write it again", "unreadable")
    if peak > MAX_AMPLITUDE:
        remedy = "scale it and write it again"
        raise AudioError(f"{name} has a sample of {peak:.3g}, where full scale is 1: {remedy}", "unreadable")


def check_rate(rate: int, name: str) -> int:
    """Check that speech can have a sample rate; returns it.

    Args:
        rate: In Hz.
        name: Name of the audio in error messages.

    Raises:
        AudioError: The rate is not one of `RATES_HZ`.
    """
    low, high = RATES_HZ
    if low <= rate <= high:
        return rate
    raise AudioError(
        f"{name} has a sample rate of {rate} Hz; {low} to {high} Hz are accepted: write it again with its true rate",
        "unreadable",
    )


def _name_of(source: bytes | str | Path) -> str:
    if isinstance(source, bytes):
        return f"audio of {len(source)} bytes"
    name = str(source)
    if len(name) <= _LONGEST_NAME:
        return f"audio file {name!r}"
    return f"audio file {name[:40]!r}…{name[-40:]!r} ({len(name)} characters)"


@contextmanager
def _explained(source: bytes | str | Path) -> Iterator[None]:
    """Convert soundfile's exceptions to an `AudioError` that names the audio, the reason and the remedy."""
    try:
        yield
    except (soundfile.SoundFileError, OSError, RuntimeError, TypeError) as error:
        name, cause = _name_of(source), getattr(error, "error_string", str(error))  # without the address of the buffer
        if refusal := _refusal(source):
            raise AudioError(f"{name} {refusal}", "unreadable") from error
        raise AudioError(f"{name} cannot be decoded ({cause}): check the file and its format", "unreadable") from error


def _refusal(source: bytes | str | Path) -> str:
    """Why a source is not an audio file (libsndfile only says "System error"); empty if it may be one."""
    if isinstance(source, bytes):
        return _no_audio(source[:_HEAD], len(source))
    try:
        with Path(source).open("rb") as file:
            head = file.read(_HEAD)
            return _no_audio(head, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        return "does not exist: check the name"
    except IsADirectoryError:
        return "is a folder, not an audio file: name the files in it"
    except PermissionError:
        return "may not be read by this user: change its owner or its mode"
    except (OSError, ValueError) as error:  # a ValueError for a name with a null byte
        return f"cannot be opened ({getattr(error, 'strerror', None) or error}): check the file"


def _no_audio(head: bytes, size: int) -> str:
    if not size:
        return "cannot be decoded (it is empty, 0 bytes): write or fetch it again"
    if head.startswith(_MAGIC):
        return ""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the head may end inside a character
    except UnicodeDecodeError:
        return ""
    if not all(c.isprintable() or c.isspace() for c in text):
        return ""
    return "cannot be decoded (it contains text, not audio): check the name"


def _may_wait(path: str | Path) -> bool:
    """Whether a path is of a device, pipe or socket, of which reading may never end."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # opening it says why
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _open(source: bytes | str | Path, raw_rate: int | None) -> soundfile.SoundFile:
    if not isinstance(source, bytes) and _may_wait(source):
        raise AudioError(
            f"{_name_of(source)} is a device, pipe or socket: write its audio to a file first", "unreadable"
        )
    # as bytes: soundfile cannot encode names that are not UTF-8
    opened = io.BytesIO(source) if isinstance(source, bytes) else os.fsencode(source)
    if raw_rate is None:
        return _SoundFile(opened)
    return soundfile.SoundFile(opened, samplerate=raw_rate, channels=1, format="RAW", subtype="PCM_16", endian="LITTLE")


class _SoundFile(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read in order if its length is open: libsndfile cannot seek in FLAC written into a pipe.

    soundfile seeks after each read, to where the file is already.
    """

    @override
    def seekable(self) -> bool:
        return self.frames < NO_END and bool(super().seekable())


def _check_whole(source: bytes | str | Path, file: soundfile.SoundFile, name: str) -> None:
    """Check that a file is as long as its header announces; libsndfile does so for some formats only.

    Of an Ogg file with several streams, it reads the first.
    """
    if file.format == "OGG" and has_chained_streams(source):
        raise AudioError(
            f"{name} has several Ogg streams one after another, of which only the first can be read: join them in a "
            "new file (ffmpeg -i OLD NEW)",
            "unreadable",
        )
    times, held = announced_times(source), file.frames / file.samplerate
    if held * (times - 1) <= _ROUNDING_S and not math.isinf(times):
        return
    announced = "its end is missing" if math.isinf(times) else f"the header announces {held * times:.3f} s"
    raise AudioError(
        f"{name} is truncated: {announced}, the file has {held:.3f} s. Fetch it again; if the transcript matches what "
        "is left, write that to a new file (ffmpeg -i OLD NEW)",
        "unreadable",
    )


def _no_sample(source: bytes | str | Path, name: str, place: str = "") -> AudioError:
    if count := bytes_without_length(source):
        return AudioError(
            f"{name} has a header that announces no audio, though {count} bytes follow, as if its recording had been "
            "interrupted: write it again with a right header (ffmpeg -i OLD NEW)",
            "unreadable",
        )
    return AudioError(f"{name} has no sample{place}", "empty")


def _read_segment(
    file: soundfile.SoundFile, start: float, end: float | None, channel: int | None, name: str, max_seconds: float
) -> NDArray[np.float32]:
    """Seek to the segment and read it, float32 `[num_samples]`."""
    if channel is not None and not 0 <= channel < file.channels:
        raise AudioError(
            f"{name} has {file.channels} channel(s): there is no channel {channel} (0 is first)", "unreadable"
        )
    first = round(start * file.samplerate)
    last = file.frames if end is None else min(round(end * file.samplerate), file.frames)
    if first >= last:
        return np.empty(0, np.float32)
    if first:
        _seek(file, first, name)
    most = math.floor(min(MAX_SAMPLES, max_seconds * file.samplerate + 1e-6))
    blocks, missing, room = [], last - first, most
    if missing > room and file.frames < NO_END:
        raise _too_long(name, missing, most, file.samplerate)
    while missing > 0:
        block = file.read(min(missing, _block(file)), dtype="float32", always_2d=True)
        if not len(block):
            break
        missing, room = missing - len(block), room - len(block)
        if room < 0:
            raise _too_long(name, most - room, most, file.samplerate)
        blocks.append(_one_channel(block, channel))
    # Streamed FLAC may leave its length open (libsndfile then reports the largest integer); otherwise it must match.
    if missing > 0 and file.frames < NO_END:
        raise AudioError(f"{name} is truncated: {missing} of {last - first} samples are missing", "unreadable")
    return np.concatenate([np.empty(0, np.float32), *blocks]) if len(blocks) != 1 else blocks[0]


def _block(file: soundfile.SoundFile) -> int:
    """Samples of each channel to decode at a time."""
    return max(1, _BLOCK_SAMPLES // int(file.channels))


def _too_long(name: str, samples: int, most: int, rate: int) -> AudioError:
    if most < MAX_SAMPLES:
        return AudioError(f"{name} has at least {samples / rate:.3f} s, more than {most / rate:g} s", "too-long")
    return AudioError(f"{name} has {samples} samples, more than the limit of {MAX_SAMPLES}: use segments", "unreadable")


def _seek(file: soundfile.SoundFile, first: int, name: str) -> None:
    if not file.seekable():
        while first > 0 and len(skipped := file.read(min(first, _block(file)), dtype="float32", always_2d=True)):
            first -= len(skipped)
        return
    preroll = min(first, round(_OPUS_PREROLL_S * file.samplerate)) if file.subtype == "OPUS" else 0
    try:
        file.seek(first - preroll)
    except soundfile.SoundFileError as error:
        raise AudioError(
            f"{name} is truncated: there is no sample {first} of the {file.frames} that it claims to have", "unreadable"
        ) from error
    if preroll:
        file.read(preroll, dtype="float32", always_2d=True)


def _one_channel(block: NDArray[np.float32], channel: int | None) -> NDArray[np.float32]:
    """`[num_samples, num_channels]` to `[num_samples]`: a channel, or the mean of all."""
    if block.shape[1] == 1:
        return block[:, 0]
    if channel is not None:
        return np.ascontiguousarray(block[:, channel])
    return _to_mono(torch.from_numpy(block)).numpy()


def _to_mono(block: Tensor) -> Tensor:
    """The mean `[num_samples]` of all channels `[num_samples, num_channels]`.

    A channel that is inverted compared with an earlier one, as after a cable with swapped wires, would cancel it: its
    sign is changed first.
    """
    if block.shape[1] == 1:
        return block[:, 0]
    inverted = _inverted(block)
    return (torch.where(inverted, -block, block) if inverted.any() else block).mean(dim=1)


def _inverted(block: Tensor) -> Tensor:
    """Which channels of `[num_samples, num_channels]` are inverted compared with earlier ones, bool `[num_channels]`.

    Differences between samples are compared: neither an offset nor the hum of the mains decides.
    """
    moves = block.diff(dim=0)
    inverted = torch.zeros(block.shape[1], dtype=torch.bool)
    if moves.sum(dim=1).square().sum() >= _CANCELLED * moves.square().sum():
        return inverted
    products = moves.T @ moves
    power = products.diagonal()
    opposite = products < _OPPOSITE * (power.unsqueeze(0) * power.unsqueeze(1)).sqrt()
    for number in range(1, block.shape[1]):
        inverted[number] = (opposite[number, :number] & ~inverted[:number]).any()
    return inverted


@lru_cache(maxsize=16)
def _resampler(from_rate: int, to_rate: int, device: str) -> torchaudio.transforms.Resample:
    """A cached resampler: for short utterances, computing the kernel costs more than applying it."""
    return torchaudio.transforms.Resample(from_rate, to_rate).to(device)


def resample(wave: Tensor, from_rate: int, to_rate: int) -> Tensor:
    """Resample by windowed-sinc interpolation, on the waveform's device.

    The filters' size grows with the terms of the ratio of the rates. A ratio with a larger term than 2,000 is replaced
    by the nearest one without, which changes speed and pitch by at most 0.05 %; 8,001 Hz are read as 8,000 Hz.

    Args:
        wave: `[..., num_samples]`.
        from_rate: sample rate of `wave` in Hz.
        to_rate: target sample rate in Hz.

    Returns:
        `[..., ceil(num_samples * to_rate / from_rate)]`, with the ratio that is used; the same tensor if that is 1.

    Raises:
        ValueError: a rate is not positive, or one is more than 2,000 times the other.
    """
    down, up = _ratio(from_rate, to_rate)
    if down == up or wave.shape[-1] == 0:
        return wave
    with _in_full_fp32(wave.device):
        return cast("Tensor", _resampler(down, up, str(wave.device))(wave))


class ResampledStream:
    """`resample` for a waveform whose samples come one after another; keeps as many as the filters read.

    Args:
        from_rate: Sample rate of the waveform in Hz.
        to_rate: Target sample rate in Hz.

    Raises:
        ValueError: As in `resample`.
    """

    def __init__(self, from_rate: int, to_rate: int) -> None:
        self._rates = from_rate, to_rate
        self._down, self._up = _ratio(from_rate, to_rate)
        self._reach = 0 if self._down == self._up else _resampler(self._down, self._up, "cpu").width
        self._wave = torch.zeros(0)
        self._blocks = 0

    def missing_samples(self, samples: int) -> int:
        """The fewest samples with which `accept` gives `samples` further ones at the target rate."""
        blocks = self._blocks + -(-samples // self._up)
        return blocks * self._down + self._reach - len(self._wave)

    def accept(self, wave: Tensor, last: bool = False) -> Tensor:
        """Samples at the target rate that can be computed by now.

        Args:
            wave: Further samples `[num_samples]`.
            last: Whether no more will come.
        """
        # a block of `up` samples is made of `down` samples and the filters' reach to either side
        self._wave = torch.cat((self._wave, wave))
        ready = max(self._blocks, (len(self._wave) - self._reach) // self._down)
        resampled = resample(self._wave, *self._rates)
        given = resampled[self._blocks * self._up : None if last else ready * self._up]
        start = max(0, ready - -(-self._reach // self._down))
        self._wave, self._blocks = self._wave[start * self._down :].clone(), ready - start
        return given


def _ratio(from_rate: int, to_rate: int) -> tuple[int, int]:
    """The samples before and after resampling that correspond to each other, the fewest.

    Raises:
        ValueError: See `resample`.
    """
    if from_rate <= 0 or to_rate <= 0:
        raise ValueError(f"cannot resample from {from_rate} Hz to {to_rate} Hz: sample rates must be positive")
    if max(from_rate, to_rate) > _MAX_TERM * min(from_rate, to_rate):
        raise ValueError(f"cannot resample from {from_rate} Hz to {to_rate} Hz: check the rates")
    # the smaller rate comes first, so that the limited denominator is the larger term
    small, large = (
        Fraction(min(from_rate, to_rate), max(from_rate, to_rate)).limit_denominator(_MAX_TERM).as_integer_ratio()
    )
    return (large, small) if from_rate > to_rate else (small, large)


@contextmanager
def _in_full_fp32(device: torch.device) -> Iterator[None]:
    """Compute convolutions on a GPU in fp32.

    cuDNN's default is TF32, whose 10 bits of mantissa leave errors of 5e-4: noise of -66 dB in all that is resampled.
    """
    if device.type != "cuda":
        yield
        return
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def load_audio(
    source: bytes | str | Path, rate: int, *, start: float = 0.0, end: float | None = None, channel: int | None = None
) -> Tensor:
    """Decode and resample to `rate`; arguments and errors as in `decode_audio`.

    Returns:
        float32 `[num_samples]` at `rate` Hz.
    """
    wave, from_rate = decode_audio(source, start=start, end=end, channel=channel)
    return resample(wave, from_rate, rate)


def to_int16(wave: Tensor) -> Tensor:
    """Round a waveform `[num_samples]` to 16 bits and clip samples outside [-1, 1).

    Raises:
        AudioError: a sample is not finite.
    """
    wave = wave.detach().to("cpu", torch.float32)
    if not torch.isfinite(wave).all():
        raise AudioError("a waveform with samples that are not finite numbers cannot be written", "unreadable")
    return (wave * _INT16_SCALE).round_().clamp_(-_INT16_SCALE, _INT16_SCALE - 1).to(torch.int16)


def encode_flac(wave: Tensor, rate: int) -> bytes:
    """Encode a waveform `[num_samples]` as 16-bit FLAC; the same input gives the same bytes.

    Raises:
        AudioError: the waveform is empty or not finite.
    """
    if wave.dim() != 1:
        raise ValueError(f"a waveform has one dimension, not {wave.dim()}: mix the channels down first")
    if wave.numel() == 0:
        raise AudioError("a waveform without samples cannot be written", "empty")
    soundfile.write(data := io.BytesIO(), to_int16(wave).numpy(), rate, format="FLAC", subtype="PCM_16")
    return data.getvalue()


def level_db(wave: Tensor | NDArray[np.float32]) -> float:
    """Root-mean-square level in dB relative to full scale (a full-scale sine has -3.01), at least `SILENCE_DB`."""
    samples = np.asarray(wave, dtype=np.float64)
    power = float(np.square(samples).mean()) if samples.size else 0.0
    return max(10.0 * math.log10(power), SILENCE_DB) if power > 0 else SILENCE_DB
