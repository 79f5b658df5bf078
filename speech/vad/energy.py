"""Voice activity by energy: frames well above the recording's noise are speech."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from speech.vad.base import Interval, Vad, VadConfig
from speech.vad.levels import frame_levels, level_range, loudest_around


class EnergyConfig(VadConfig):
    """Voice activity by energy."""

    kind: Literal["energy"] = "energy"
    share: float = Field(default=0.4, gt=0, lt=1)
    """Threshold between the noise level (0) and the speech level (1), on the scale of dB."""
    min_range_db: float = Field(default=15.0, ge=0)
    """Smallest distance of speech level and noise level in dB; if they are closer, everything counts as speech."""
    smooth_s: float = Field(default=0.2, ge=0)
    """Pauses in speech, in seconds, up to which frames belong to the speech around them."""

    @override
    def build(self) -> Vad:
        return EnergyVad(self)


class EnergyVad(Vad):
    """Compares the energy of frames with a threshold between the noise level and the level of the speech around them.

    The noise level is the 10th percentile of the frames' energy in dB. A waveform in which the 95th is close to it has
    no pauses, or it is too noisy for this method. The level of the speech is that of the loudest frame within half a
    second: a quiet speaker is found beside a loud one.
    """

    cfg: EnergyConfig

    def speech(self, wave: Tensor, sample_rate: int) -> list[Interval]:
        """The runs of loud frames; pauses up to `smooth_s` do not interrupt them."""
        levels, size = frame_levels(wave, sample_rate)
        if not len(levels):
            return [(0, len(wave))] if len(wave) else []
        noise, speech = level_range(levels)
        if speech - noise < self.cfg.min_range_db:
            return [(0, len(wave))]
        range_db = (loudest_around(levels) - noise).clamp(min=self.cfg.min_range_db)
        loud = torch.nonzero(levels > noise + self.cfg.share * range_db).flatten().tolist()
        intervals: list[Interval] = []
        for frame in loud:
            start, end = frame * size, (frame + 1) * size
            if intervals and start - intervals[-1][1] <= self.cfg.smooth_s * sample_rate:
                intervals[-1] = (intervals[-1][0], end)
            else:
                intervals.append((start, end))
        return intervals
