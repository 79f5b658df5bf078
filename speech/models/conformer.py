"""Configuration of the Conformer (Gulati et al. 2020, arXiv:2005.08100)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from configurable.configuration import Configuration
from speech.models.config import ChunkedModelConfig, ModelConfig

if TYPE_CHECKING:
    from speech.models.networks.base import AcousticModel


class ChunkConfig(Configuration):
    """Chunks of a network that recognizes whole recordings and speech as it comes (U2: Zhang et al. 2020).

    In training, each batch has chunks of another size, or utterances are one chunk each ("dynamic chunk training" of
    arXiv:2012.05481, in the form of WeNet's `add_optional_chunk_mask`), so that one network works with any size.
    Convolutions read no later frames. The frames of a chunk attend to each other and to `left` frames before it, which
    are a number of frames as in icefall (`left_context_frames`), not of chunks as in WeNet.
    """

    left: int = Field(default=64, ge=0)
    """Output frames before a chunk that its frames attend to."""
    longest: int = Field(default=25, ge=1)
    """Output frames of the longest chunk in training, apart from whole utterances; sizes are drawn uniformly from 1."""
    whole: float = Field(default=0.5, ge=0, le=1)
    """Share of the training batches whose utterances are one chunk each, so that all frames attend to all."""
    offline: int = Field(default=0, ge=0)
    """Output frames of a chunk in validation and when whole recordings are recognized; 0: each utterance is one chunk.
    Recognition of a stream has chunks of the size that it is asked for."""


class ConformerConfig(ChunkedModelConfig):
    """Conformer; about four million parameters with the defaults."""

    kind: Literal["conformer"] = "conformer"
    can_be_split: ClassVar[bool] = True
    why_unsplit: ClassVar[str] = (
        "with model.chunk, a Conformer cannot be split into stages, each of which would draw its own chunks: use "
        "another strategy than pipeline"
    )
    tiny: ClassVar[dict[str, Any]] = ModelConfig.tiny | {"heads": 2, "kernel": 5, "feed_forward": 2}
    heads: int = Field(default=4, ge=1)
    """Attention heads per layer; `dim` must be a multiple of twice this number."""
    kernel: int = Field(default=15, ge=3)
    """Kernel size of the depthwise convolution in frames; odd."""
    feed_forward: int = Field(default=4, ge=1)
    """Hidden width of the feed-forward modules, as a multiple of `dim`."""
    chunk: ChunkConfig | None = None
    """Train it to recognize speech as it comes, with chunks of any size; without, it needs whole utterances."""

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
