"""Configuration of the Conformer (Gulati et al. 2020, arXiv:2005.08100)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from speech.models.config import ModelConfig

if TYPE_CHECKING:
    from speech.models.networks.base import AcousticModel


class ConformerConfig(ModelConfig):
    """Conformer; about four million parameters with the defaults."""

    kind: Literal["conformer"] = "conformer"
    can_be_split: ClassVar[bool] = True
    tiny: ClassVar[dict[str, Any]] = ModelConfig.tiny | {"heads": 2, "kernel": 5, "feed_forward": 2}
    heads: int = Field(default=4, ge=1)
    """Attention heads per layer; `dim` must be a multiple of twice this number."""
    kernel: int = Field(default=15, ge=3)
    """Kernel size of the depthwise convolution in frames; odd."""
    feed_forward: int = Field(default=4, ge=1)
    """Hidden width of the feed-forward modules, as a multiple of `dim`."""

    @model_validator(mode="after")
    def _check_shape(self) -> ConformerConfig:
        if self.dim % (2 * self.heads):
            raise ValueError(f"model.dim={self.dim} must be a multiple of 2 x heads={2 * self.heads}")
        if self.kernel % 2 == 0:
            raise ValueError(f"model.kernel={self.kernel} must be odd")
        return self

    @override
    def build(self, num_features: int, vocab_size: int) -> AcousticModel:
        from speech.models.networks.conformer import Conformer

        return Conformer(self, num_features, vocab_size)
