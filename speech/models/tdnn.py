"""Configuration of the factorized time-delay network (TDNN-F; Povey et al., Interspeech 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from configurable.former_fields import former_fields
from speech.models.config import ModelConfig

if TYPE_CHECKING:
    from speech.models.networks.base import AcousticModel


class TdnnConfig(ModelConfig):
    """Factorized time-delay network; about 2.1 million parameters with the defaults and 2,000 tied states."""

    kind: Literal["tdnn"] = "tdnn"
    can_be_split: ClassVar[bool] = True
    streaming: ClassVar[dict[str, Any] | None] = {}
    tiny: ClassVar[dict[str, Any]] = ModelConfig.tiny | {"dim": 24, "layers": 2, "bottleneck": 8, "prefinal": 12}
    dim: int = Field(default=448, ge=8)
    """Width of a layer."""
    layers: int = Field(default=10, ge=1)
    """Factorized layers."""
    subsampling: Literal[1, 2, 4, 8] = 1
    """Feature frames per output frame."""
    bottleneck: int = Field(default=96, ge=4)
    """Width of the linear bottleneck of each layer; at most `dim`."""
    narrow_layers: int = Field(default=3, ge=0)
    """First layers, which look one frame to either side; the others look `time_stride` frames."""
    time_stride: int = Field(default=3, ge=1, le=1000)
    """Frames to either side that the other layers look; after subsampling, 1 is enough."""
    prefinal: int = Field(default=128, ge=4)
    """Width of the linear bottleneck before the output layer."""

    _former = former_fields(bypass=0.66)

    @model_validator(mode="after")
    def _check_shape(self) -> TdnnConfig:
        if self.bottleneck > self.dim:
            raise ValueError(f"model.bottleneck={self.bottleneck} must not exceed dim={self.dim}: lower it")
        return self

    @property
    @override
    def streams(self) -> bool:
        return True

    @property
    @override
    def causal(self) -> bool:
        return False  # it was not made to stream: a frame reads a few to either side, whatever the features are

    @property
    def strides(self) -> list[int]:
        """Frames to either side that each layer looks."""
        return [1 if number < self.narrow_layers else self.time_stride for number in range(self.layers)]

    @property
    @override
    def ahead(self) -> int:
        return sum(self.strides)

    @override
    def build(self, num_features: int, vocab_size: int) -> AcousticModel:
        from speech.models.networks.tdnn import Tdnn

        return Tdnn(self, num_features, vocab_size)
