"""Levels of short frames of a recording, and the recording brought to one level for detectors of speech."""

import torch
from torch import Tensor

_FRAME_S = 0.02
FLOOR_DB = -100.0
"""Smallest level of a frame, below the noise of 16 bits: that of digital silence."""
_TARGET_DB = -20.0
"""Level of the loudest frames in `leveled`, that of speech close to a microphone."""
_REACH = 25
"""Frames before and after a frame within which the loudest frame says how loud speech is there: half a second."""
_RANGE_DB = 30.0
"""Noise stays this far below the target: pauses that are longer than a second do not become as loud as speech."""


def frame_levels(wave: Tensor, sample_rate: int) -> tuple[Tensor, int]:
    """Energy of the waveform's whole frames in dB of full scale, at least `FLOOR_DB`; and their number of samples."""
    size = max(1, int(_FRAME_S * sample_rate))
    if len(wave) < size:
        return torch.empty(0), size
    power = wave.unfold(0, size, size).square().mean(dim=1)
    return 10 * power.clamp(min=10 ** (FLOOR_DB / 10)).log10(), size


def level_range(levels: Tensor) -> tuple[float, float]:
    """Level of noise and level of speech: the 10th and the 95th percentile of the frames' levels."""
    noise, speech = torch.quantile(levels, torch.tensor([0.1, 0.95])).tolist()
    return noise, speech


def loudest_around(levels: Tensor) -> Tensor:
    """The largest of the levels [num_frames] within half a second of each frame."""
    return torch.nn.functional.max_pool1d(levels[None], 2 * _REACH + 1, stride=1, padding=_REACH)[0]


def leveled(wave: Tensor, sample_rate: int) -> Tensor:
    """A recording with a gain that follows its level: a quiet speaker becomes as loud as a loud one.

    The gain of a frame brings the loudest frame around it to the same level, and less of it where that would make noise
    as loud as speech. Digital silence does not count as noise.

    Args:
        wave: Samples [num_samples].
        sample_rate: In Hz.

    Returns:
        Samples [num_samples], which may exceed ±1.
    """
    levels, size = frame_levels(wave, sample_rate)
    sounding = levels[levels > FLOOR_DB]
    if not len(sounding):
        return wave
    lowest = min(float(sounding.max()), level_range(sounding)[0] + _RANGE_DB)
    loudest = loudest_around(levels).clamp(min=lowest)[None, None]
    # the mean of as many frames: a gain that jumps sounds like the start of a word
    smooth = torch.nn.functional.avg_pool1d(loudest, 2 * _REACH + 1, 1, _REACH, count_include_pad=False)[0, 0]
    gains = _TARGET_DB - smooth
    gains = torch.nn.functional.interpolate(gains[None, None], scale_factor=float(size), mode="linear")[0, 0]
    return wave * 10 ** (torch.cat([gains, gains[-1:].expand(len(wave) - len(gains))]) / 20)
