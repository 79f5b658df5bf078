"""Features of the speaker-adapted GMM-HMM: LDA, MLLT and a transform for each speaker (fMLLR; Gales 1998, CSL 12)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from typing_extensions import override

from speech.features.adapted import AdaptedConfig


class FmllrConfig(AdaptedConfig):
    """LDA, MLLT and fMLLR features of the GMM-HMM that the section `align` trains."""

    kind: Literal["fmllr"] = "fmllr"
    dim: int = Field(default=40, ge=1)
    """Features of a frame, as many as `align.lda_dim`."""

    @property
    @override
    def width(self) -> int:
        return self.dim
