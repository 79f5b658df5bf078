"""Voice activity by energy: frames well above the recording's noise are speech."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from speech.vad.base import Interval, Vad, VadConfig

_FRAME_S = 0.02
FLOOR_DB = -100.0
"""Smallest level of a frame, below the noise of 16 bits: that of digital silence."""


class EnergyConfig(VadConfig):
    """Voice activity by energy."""

    kind: Literal["energy"] = "energy"
    share: float = Field(default=0.4, gt=0, lt=1)
    """Threshold between the noise level (0) and the speech level (1), on the scale of dB."""
    min_range_db: float = Field(default=15.0, ge=0)
    """Smallest distance of speech level and noise level; if they are closer, everything counts as speech."""
    smooth_s: float = Field(default=0.2, ge=0)
    """Pauses in speech, in seconds, up to which frames belong to the speech around them."""


class EnergyVad(Vad):
    """Compares the energy of frames with a threshold between the noise level and the speech level of the waveform.

    The levels are the 10th and the 95th percentile of the frames' energy in dB. A waveform in which they are close
    has no pauses, or it is too noisy for this method.
    """

    config = EnergyConfig
    cfg: EnergyConfig

    def speech(self, wave: Tensor, sample_rate: int) -> list[Interval]:
        """The runs of loud frames; pauses up to `smooth_s` do not interrupt them."""
        levels, size = frame_levels(wave, sample_rate)
        if not len(levels):
            return [(0, len(wave))] if len(wave) else []
        noise, speech = level_range(levels)
        if speech - noise < self.cfg.min_range_db:
            return [(0, len(wave))]
        loud = torch.nonzero(levels > noise + self.cfg.share * (speech - noise)).flatten().tolist()
        found: list[Interval] = []
        for frame in loud:
            start, end = frame * size, (frame + 1) * size
            if found and start - found[-1][1] <= self.cfg.smooth_s * sample_rate:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
        return found


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
