"""Features of the speaker-adapted GMM-HMM: LDA, MLLT and a transform for each speaker (fMLLR; Gales 1998, CSL 12).

They are not a function of one waveform: all speech of a speaker is needed to normalize it and to estimate the
transform. For training, the stage `adapt` stores them; for recognition, `speech.hmm.adaptation` makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from speech.features.config import FeatureConfig
from speech.features.mel import FeatureError

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank

_OF_THE_GAUSSIANS = ("num_mels", "frame_ms", "low_freq", "high_freq", "dither", "preemphasis", "scale")
_NEED_LEVELS = ("cmvn_gate_db", "trim_db")


class FmllrConfig(FeatureConfig):
    """LDA, MLLT and fMLLR features of the GMM-HMM that the section `align` trains."""

    kind: Literal["fmllr"] = "fmllr"
    dim: int = Field(default=40, ge=1)
    """Features of a frame, as many as `align.lda_dim`."""

    adapted: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_options(self) -> FmllrConfig:
        fields = type(self).model_fields
        for option in _OF_THE_GAUSSIANS:
            if getattr(self, option) != fields[option].default:
                raise ValueError(f"{option} belongs to the features of the GMM-HMM: set it in align.features")
        for option in _NEED_LEVELS:
            if getattr(self, option):
                raise ValueError(f"{option} needs the level of frames, and adapted features have none: remove it")
        if self.stored:
            raise ValueError("stored is for other kinds: adapted features are always stored: remove it")
        if self.cmvn == "speaker":
            raise ValueError("cmvn is speaker, but adapted features are normalized by speaker already: use global")
        return self

    @property
    @override
    def width(self) -> int:
        return self.dim

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        raise FeatureError(
            "features of kind fmllr need all speech of a speaker, not one waveform: give the stored ones, or "
            "use a Recognizer, which adapts to speakers"
        )
