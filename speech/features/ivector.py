"""I-vectors as features: how the speaker sounds, beside the frames that say what is said (Saon et al. 2013, ASRU).

The background model and the total variability matrix are estimated from the training set, on the LDA and MLLT features
of the GMM-HMM before fMLLR (`speech.hmm.ivector`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from typing_extensions import override

from configurable.former_fields import former_fields
from speech.features.adapted import AdaptedConfig


class IvectorConfig(AdaptedConfig):
    """The speaker's i-vector, the same in all frames; only as a part of `appended` features."""

    kind: Literal["ivector"] = "ivector"
    dim: int = Field(default=100, ge=1)
    """Dimensions of an i-vector."""
    gaussians: int = Field(default=512, ge=1)
    """Components of the background model."""
    background_iterations: int = Field(default=4, ge=1)
    """EM iterations of the background model at each of its sizes 2, 4, 8 and so on."""
    iterations: int = Field(default=10, ge=1)
    """EM iterations of the total variability matrix."""
    extraction: Literal["speaker", "utterance", "online"] = "speaker"
    """What an i-vector is extracted from: all speech of the speaker, the utterance, or the utterance up to the frame
    (for streaming recognition)."""

    _former_fields = former_fields(background_every=5, period=10)

    @property
    @override
    def width(self) -> int:
        return self.dim
