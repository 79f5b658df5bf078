"""Configuration of the LSTM in one direction, which recognizes speech as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from speech.models.config import ModelConfig

if TYPE_CHECKING:
    from speech.models.networks.base import AcousticModel


class LstmEncoderConfig(ModelConfig):
    """LSTM in one direction, which looks a few frames ahead (Deep Speech 2: Amodei et al. 2016)."""

    kind: Literal["lstm"] = "lstm"
    streaming: ClassVar[dict[str, Any] | None] = {}
    tiny: ClassVar[dict[str, Any]] = ModelConfig.tiny | {"dim": 24}
    dim: int = Field(default=320, ge=8)
    """Cells of a layer."""
    layers: int = Field(default=5, ge=1)
    """Layers."""
    lookahead: int = Field(default=4, ge=0)
    """Output frames after a frame that its output reads, by a convolution behind the layers; 0: none."""

    @property
    @override
    def streams(self) -> bool:
        return True

    @property
    @override
    def ahead(self) -> int:
        return self.lookahead

    @override
    def build(self, num_features: int, vocab_size: int) -> AcousticModel:
        from speech.models.networks.lstm_encoder import LstmEncoder

        return LstmEncoder(self, num_features, vocab_size)
