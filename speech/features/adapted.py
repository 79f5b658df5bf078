"""Features that all speech of a speaker is needed for: those of the speaker-adapted GMM-HMM, and i-vectors.

They are not a function of one waveform: all speech of a speaker is needed to normalize it and to adapt to the speaker.
For training, the stage `adapt` stores them; for recognition, `recognition.adaptation` makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator
from typing_extensions import override

from speech.features.config import FilterBankConfig
from speech.features.mel import FeatureError

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank

_OF_THE_GAUSSIANS = ("num_mels", "frame_ms", "low_freq", "high_freq", "level_db", "dither", "preemphasis", "scale")


class AdaptedConfig(FilterBankConfig):
    """Features that are adapted to speakers."""

    adapted: ClassVar[bool] = True
    has_levels: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_options(self) -> AdaptedConfig:
        fields = type(self).model_fields
        for option in _OF_THE_GAUSSIANS:
            if getattr(self, option) != fields[option].default:
                raise ValueError(f"{option} belongs to {self.source_of_options}")
        if self.stored:
            raise ValueError("stored is for other kinds: adapted features are always stored: remove it")
        if self.cmvn == "speaker":
            raise ValueError("cmvn is speaker, but adapted features are normalized by speaker already: use global")
        return self

    @property
    @override
    def whole_utterance(self) -> str:
        return f"features.kind={self.kind} needs all speech of a speaker: set features.kind=logmel"

    @property
    def source_of_options(self) -> str:
        """Where the options of frames and filters are set instead."""
        return "the features of the GMM-HMM: set it in align.features"

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        raise FeatureError(
            f"features of kind {self.kind} need all speech of a speaker, not one waveform: give the stored ones, or "
            "use a Recognizer, which adapts to speakers"
        )
