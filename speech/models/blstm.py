"""Configuration of the bidirectional LSTM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from speech.models.config import ModelConfig

if TYPE_CHECKING:
    from speech.models.networks.base import AcousticModel


class BlstmConfig(ModelConfig):
    """Bidirectional LSTM, as in the published recipe."""

    kind: Literal["blstm"] = "blstm"
    can_be_split: ClassVar[bool] = True
    tiny: ClassVar[dict[str, Any]] = ModelConfig.tiny | {"dim": 24}
    bottleneck: int = Field(default=0, ge=0)
    """Width of the linear bottleneck before the output layer (published: 256); 0 for none."""

    @override
    def build(self, num_features: int, vocab_size: int) -> AcousticModel:
        from speech.models.networks.blstm import Blstm

        return Blstm(self, num_features, vocab_size)
