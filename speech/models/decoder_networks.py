"""Configuration of decoder networks, which predict a text token by token while they attend to an encoder's frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from configurable.choices import Choice

if TYPE_CHECKING:
    from speech.models.networks.decoder import DecoderNetwork


class DecoderNetworkConfig(Choice, ABC):
    """Configuration that all decoder networks have.

    Attributes:
        tiny: Fields of a network that trains in a moment: the tests of all kinds build it.
    """

    tiny: ClassVar[dict[str, Any]] = {"dim": 16, "layers": 2, "heads": 2}

    dim: int = Field(default=144, ge=8)
    """Width of a token's vector."""
    layers: int = Field(default=4, ge=1)
    """Decoder layers."""
    heads: int = Field(default=4, ge=1)
    """Attention heads per layer; `dim` must be a multiple of twice this number."""
    feed_forward: int = Field(default=4, ge=1)
    """Hidden width of the feed-forward modules, as a multiple of `dim`."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout probability of the embeddings and of each module's output."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.dim % (2 * self.heads):
            raise ValueError(f"decoder dim={self.dim} must be a multiple of 2 x heads={2 * self.heads}")
        return self

    @property
    def tells_languages(self) -> bool:
        """Whether a token of each utterance's language precedes its text, and is predicted unless it is given."""
        return False

    @abstractmethod
    def build(self, encoder_width: int, vocab_size: int) -> DecoderNetwork:
        """Make an initialized network, on torch's device `meta`, too; torch is imported in here.

        Args:
            encoder_width: Width of the encoder's frames.
            vocab_size: Tokens, the one that ends a text included.
        """
