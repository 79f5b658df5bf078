"""Configuration of the bidirectional LSTM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from configurable.configuration import Configuration
from speech.models.config import ChunkedModelConfig, ModelConfig

if TYPE_CHECKING:
    from speech.models.networks.base import AcousticModel


class LatencyConfig(Configuration):
    """Chunks of a bidirectional LSTM that recognizes speech as it comes (Zhang et al. 2016, arXiv:1510.08983).

    The forward direction goes on from chunk to chunk. The backward one reads a chunk and `ahead` frames after it.
    """

    frames: int = Field(default=16, ge=1)
    """Output frames of a chunk in training and when whole recordings are recognized. Recognition of a stream has chunks
    of the size that it is asked for."""
    ahead: int = Field(default=5, ge=0)
    """Output frames after a chunk that its frames read."""


class BlstmConfig(ChunkedModelConfig):
    """Bidirectional LSTM, as in the published recipe."""

    kind: Literal["blstm"] = "blstm"
    can_be_split: ClassVar[bool] = True
    why_unsplit: ClassVar[str] = (
        "with model.chunk, a BLSTM cannot be split into stages: each would need frames again that the one before has "
        "sent with another chunk. Use another strategy than pipeline"
    )
    tiny: ClassVar[dict[str, Any]] = ModelConfig.tiny | {"dim": 24}
    bottleneck: int = Field(default=0, ge=0)
    """Width of the linear bottleneck before the output layer (published: 256); 0 for none."""
    chunk: LatencyConfig | None = None
    """Train it to recognize speech as it comes, with a limited look-ahead; without, it needs whole utterances."""

    @property
    @override
    def ahead(self) -> int:
        return self.chunk.ahead if self.chunk else 0

    @override
    def build(self, num_features: int, vocab_size: int) -> AcousticModel:
        from speech.models.networks.blstm import Blstm

        return Blstm(self, num_features, vocab_size)
