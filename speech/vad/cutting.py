"""Cuts recordings of any length into pieces of speech, in pauses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from speech.audio import resample
from speech.vad.base import Interval, Vad
from speech.vad.levels import FLOOR_DB, frame_levels, level_range

PAUSE_S = 0.3
"""Pauses that are at least this long, in seconds, separate pieces, unless something else is asked for."""
_MIN_PAUSE_S = 0.1
"""A recording that is too long for one piece is cut in a pause of at least this length, if it has one."""

_WORD_S = 1.0
"""Longest recording without detected speech that may still be a word."""
_WORD_RANGE_DB = 5.0
"""Smallest range of its levels: white to brown noise of 50 ms to 1 s has at most 2.5 dB, digits Silero missed 5.7."""
_WORD_LEVEL_DB = -90.0
"""Smallest level of its loud frames; the level of the differences is some 10 dB below that of the speech."""


@dataclass(frozen=True)
class SpeechSegment:
    """A segment of a recording that contains speech."""

    wave: Tensor
    """Samples [num_samples]."""
    start: float
    """Seconds of the recording before it."""
    sample_rate: int
    """In Hz."""
    speech: tuple[tuple[float, float], ...]
    """Start and end, in seconds of the recording, of the speech between pauses of at least `PAUSE_S`."""

    def at(self, sample_rate: int) -> "SpeechSegment":
        """The segment with samples of another rate in Hz."""
        return replace(self, wave=resample(self.wave, self.sample_rate, sample_rate), sample_rate=sample_rate)


def cut(vad: Vad, blocks: Iterable[tuple[Tensor, int]], max_seconds: float) -> Iterator[SpeechSegment]:
    """Cut a recording into pieces that contain speech.

    Detection runs on `max_seconds` of the recording at a time, and the recording is cut in the last pause of these. If
    there is none, it is cut at the quietest 50 ms of their last third. The audio between two pieces is a pause. A
    recording of up to a second in which no speech is found is one piece if its level varies like that of speech.

    Args:
        vad: Finds speech; its configuration may say which pauses separate pieces.
        blocks: Consecutive blocks of samples [num_samples], each with its sample rate in Hz. At most `max_seconds` and
            one block are in memory.
        max_seconds: Longest piece in seconds.
    """
    for pieces in cut_windows(vad, blocks, max_seconds):
        yield from pieces


def cut_windows(
    vad: Vad, blocks: Iterable[tuple[Tensor, int]], max_seconds: float, pause_s: float = PAUSE_S
) -> Iterator[Iterator[SpeechSegment]]:
    """The pieces of `cut`, those of up to `max_seconds` of the recording at a time, even if there are none.

    Args:
        vad: As for `cut`.
        blocks: As for `cut`.
        max_seconds: As for `cut`.
        pause_s: Shortest pause in seconds that separates pieces, unless the detector's configuration names one.
    """
    wave, before = torch.empty(0), 0
    rate = 0
    if vad.cfg.pause_s is not None:
        pause_s = vad.cfg.pause_s
    for block, rate in blocks:
        wave = torch.cat([wave, block]) if len(wave) else block
        limit = max(3, int(max_seconds * rate))
        while len(wave) > limit:
            window = wave[:limit]
            speech = vad.speech(window, rate)
            end = _last_pause(speech, window, rate)
            yield _pieces(vad, window[:end], rate, speech, before, pause_s)
            wave, before = wave[end:], before + end
    if len(wave):
        speech = vad.speech(wave, rate)
        if not speech and not before and _may_be_word(wave, rate):
            speech = [(0, len(wave))]
        yield _pieces(vad, wave, rate, speech, before, pause_s)


def cut_whole(vad: Vad, wave: Tensor, rate: int, most: int) -> list[Tensor]:
    """Cut a waveform in its pauses as `cut` does, but keep all of it: consecutive pieces.

    Args:
        vad: Finds speech.
        wave: Samples [num_samples].
        rate: In Hz.
        most: Samples of the longest piece, at least 3.
    """
    pieces = []
    while len(wave) > most:
        window = wave[:most]
        end = _last_pause(vad.speech(window, rate), window, rate)
        pieces.append(wave[:end])
        wave = wave[end:]
    return [*pieces, wave]


def _may_be_word(wave: Tensor, rate: int) -> bool:
    """Whether a recording without detected speech may be a word: it is short, and its level varies unlike noise's.

    Silero VAD misses words in clips that are cut so tightly that it sees no context. Levels are those of differences
    between samples, since the level of rumble varies, and digital silence does not count.
    """
    sounding = torch.nonzero(wave).flatten()
    if len(wave) > _WORD_S * rate or not len(sounding):
        return False
    levels, _ = frame_levels(wave[int(sounding[0]) : int(sounding[-1]) + 1].diff(), rate)
    levels = levels[levels > FLOOR_DB]
    if not len(levels):
        return False
    noise, speech = level_range(levels)
    return speech >= _WORD_LEVEL_DB and speech - noise >= _WORD_RANGE_DB


def _last_pause(speech: list[Interval], window: Tensor, rate: int) -> int:
    """Sample in the middle of the window's last pause, or of the quietest 50 ms in its last third."""
    edges = [0, *(edge for interval in speech for edge in interval), len(window)]
    pauses = [
        begin + end for begin, end in zip(edges[::2], edges[1::2], strict=True) if end - begin >= _MIN_PAUSE_S * rate
    ]
    if pauses and pauses[-1] >= 2:
        return pauses[-1] // 2
    hop = max(1, min(int(0.05 * rate), len(window) // 3))
    tail = len(window) * 2 // 3
    quietest = int(window[tail:].unfold(0, hop, hop).square().mean(dim=1).argmin())
    return tail + quietest * hop + hop // 2


def _pieces(
    vad: Vad, wave: Tensor, rate: int, speech: list[Interval], before: int, pause_s: float
) -> Iterator[SpeechSegment]:
    """The pieces of a window: speech with short pauses in it, and with some of the long pauses around it."""
    inside = [(start, min(end, len(wave))) for start, end in speech if start < len(wave)]
    merged = _merged(inside, pause_s * rate)
    finer = _merged(inside, min(pause_s, PAUSE_S) * rate)
    # two pieces share the pause between them
    borders = [0, *((left[1] + right[0]) // 2 for left, right in pairwise(merged)), len(wave)]
    pad = int(vad.cfg.pad_s * rate)
    for (start, end), left, right in zip(merged, borders, borders[1:], strict=False):
        first, last = max(left, start - pad), min(right, end + pad)
        spoken = (((before + at) / rate, (before + to) / rate) for at, to in finer if start <= at < end)
        # a copy: a slice would keep the whole block in memory, and pieces wait to be recognized together
        yield SpeechSegment(wave[first:last].clone(), (before + first) / rate, rate, tuple(spoken))


def _merged(speech: list[Interval], pause: float) -> list[Interval]:
    """Intervals without the pauses of fewer samples."""
    merged: list[Interval] = []
    for start, end in speech:
        if merged and start - merged[-1][1] < pause:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
