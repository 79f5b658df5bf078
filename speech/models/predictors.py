"""Configuration of predictors: what a transducer knows of the tokens so far (Graves 2012, "prediction network")."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from configurable.choices import Choice

if TYPE_CHECKING:
    from speech.models.networks.predictor import Predictor


class PredictorConfig(Choice, ABC):
    """Configuration that all predictors have.

    Attributes:
        tiny: Fields of a network that trains in a moment: the tests of all kinds build it.
    """

    tiny: ClassVar[dict[str, Any]] = {"dim": 12}

    dim: int = Field(default=256, ge=1)
    """Width of a token's vector, and cells of an LSTM."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout probability of the tokens' vectors and of each layer's output."""

    @property
    def depth(self) -> int:
        """How many layers it makes, each of which has weights."""
        return 1

    @abstractmethod
    def build(self, vocab_size: int) -> Predictor:
        """Make an initialized network, on torch's device `meta`, too; torch is imported in here.

        Args:
            vocab_size: Tokens, the blank included.
        """


class StatelessPredictorConfig(PredictorConfig):
    """The last few tokens, each with a weight by its distance (Ghodsi et al. 2020, "Stateless prediction network")."""

    kind: Literal["stateless"] = "stateless"
    context: int = Field(default=2, ge=1, le=64)
    """How many of the last tokens are known."""

    @override
    def build(self, vocab_size: int) -> Predictor:
        from speech.models.networks.predictor import StatelessPredictor

        return StatelessPredictor(self, vocab_size)


class LstmPredictorConfig(PredictorConfig):
    """An LSTM over all tokens so far (Graves et al. 2013, "Speech recognition with deep recurrent neural networks")."""

    kind: Literal["lstm"] = "lstm"
    tiny: ClassVar[dict[str, Any]] = PredictorConfig.tiny | {"layers": 2}
    layers: int = Field(default=1, ge=1)
    """Number of layers."""

    @property
    @override
    def depth(self) -> int:
        return self.layers

    @override
    def build(self, vocab_size: int) -> Predictor:
        from speech.models.networks.predictor import LstmPredictor

        return LstmPredictor(self, vocab_size)
