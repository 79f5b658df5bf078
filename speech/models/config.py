"""Configuration of all acoustic models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from configurable.choices import Choice

if TYPE_CHECKING:
    from speech.models.networks.base import AcousticModel


class ModelConfig(Choice, ABC):
    """Configuration that all acoustic models have.

    Attributes:
        can_be_split: Whether the network has `AcousticModel.stage`, which the strategy `pipeline` needs.
        free_fields: Fields that do not change what weights mean: a training may begin with a model that has others.
        tiny: Fields of a network that trains in a moment: the tests of all models build it, whatever its kind.
    """

    can_be_split: ClassVar[bool] = False
    free_fields: ClassVar[frozenset[str]] = frozenset({"layers", "dropout"})
    tiny: ClassVar[dict[str, Any]] = {"dim": 16, "layers": 1, "subsampling": 2, "channels": 4}

    dim: int = Field(default=144, ge=8)
    """Width: model dimension of a Conformer or TDNN, cells per direction of a BLSTM."""
    layers: int = Field(default=8, ge=1)
    """Encoder layers."""
    subsampling: Literal[1, 2, 4, 8] = 4
    """Feature frames per output frame. An utterance needs at least as many output frames as tokens."""
    channels: int = Field(default=32, ge=1)
    """Channels of the subsampling convolutions."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout probability throughout the encoder."""

    @property
    def halvings(self) -> int:
        """How often the front end halves the number of frames; each halving rounds up."""
        return self.subsampling.bit_length() - 1

    @abstractmethod
    def build(self, num_features: int, vocab_size: int) -> AcousticModel:
        """Make an initialized model.

        Torch modules are imported, or defined, in here: a configuration is read without torch. It must work on torch's
        device `meta`, too, with tensors for each layer: a file of weights is compared with the sizes first.

        Args:
            num_features: Width of a feature frame.
            vocab_size: Outputs: tokens, the blank included, or tied states.
        """
