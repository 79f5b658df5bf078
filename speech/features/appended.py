"""Features of several kinds side by side in each frame (Kaldi's `paste-feats`), for hybrid networks.

The defaults are the input of the published recipe (arXiv:1904.04956), 260 features: 40 of fMLLR, an i-vector of 100,
and 40 log-mel energies with deltas and delta-deltas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from speech.features.adapted import AdaptedConfig
from speech.features.config import FeatureConfig
from speech.features.fmllr import FmllrConfig
from speech.features.ivector import IvectorConfig
from speech.features.logmel import LogMelConfig

if TYPE_CHECKING:
    from speech.features.registry import PartChoice  # pydantic gets it there, where all kinds are known

_OF_THE_WHOLE = ("stored", "trim_db", "cmvn_gate_db", "cmvn_floor", "cmvn_variance")


class AppendedConfig(AdaptedConfig):
    """Features of several kinds, side by side; at least one of them is adapted to speakers."""

    kind: Literal["appended"] = "appended"
    parts: tuple[PartChoice, ...] = Field(
        default=(FmllrConfig(), IvectorConfig(), LogMelConfig(num_mels=40, delta_order=2)), min_length=1
    )
    """The features that are appended, in this order, each with its own deltas and splicing. A part may be normalized by
    speaker (`cmvn: speaker`) before; all are normalized together, as the whole says, afterwards."""

    @model_validator(mode="after")
    def _check_parts(self) -> AppendedConfig:
        for number, part in enumerate(self.parts):
            for option in _OF_THE_WHOLE:
                if getattr(part, option) != type(part).model_fields[option].default:
                    raise ValueError(f"parts.{number}.{option} is set, but it has no effect in a part: remove it")
            if part.cmvn not in ("global", "speaker"):
                raise ValueError(
                    f"parts.{number}.cmvn is {part.cmvn}, but parts are normalized by speaker or together: use speaker "
                    "or global"
                )
            if part.stride != 1:
                raise ValueError(f"parts.{number}.stride is {part.stride}: set the stride of the whole instead")
            if part.hop_ms != self.hop_ms:
                raise ValueError(
                    f"parts.{number}.hop_ms is {part.hop_ms:g}, but frames of the whole come every {self.hop_ms:g} ms: "
                    f"set both to the same"
                )
        if not any(part.adapted for part in self.parts):
            raise ValueError("none of the parts is adapted to speakers: add {kind: fmllr} or {kind: ivector}")
        if sum(isinstance(part, IvectorConfig) for part in self.parts) > 1:
            raise ValueError("two parts are i-vectors: remove one")
        return self

    @property
    @override
    def source_of_options(self) -> str:
        return "the parts: set it in one of features.parts"

    @property
    @override
    def components(self) -> tuple[FeatureConfig, ...]:
        return self.parts

    @property
    @override
    def width(self) -> int:
        return sum(part.width * part.frame_factor for part in self.parts)
