"""The LSTM language model (Sundermeyer, Schlüter and Ney 2012, "LSTM neural networks for language modeling")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from speech.lm.base import Estimator
from speech.lm.network import NetworkConfig, NetworkEstimator

if TYPE_CHECKING:
    from speech.lm.network import NetworkTrainer
    from speech.models.networks.base import TrainableNetwork


class LstmConfig(NetworkConfig):
    """A recurrent network with long short-term memory, trained by the engine."""

    kind: Literal["lstm"] = "lstm"
    dim: int = Field(default=256, ge=1)
    """Cells of each layer, and width of the words' embeddings."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Dropout probability of the embeddings and of each layer's output."""

    @override
    def build_network(self, num_words: int) -> TrainableNetwork:
        from speech.lm.network_model import LstmNetwork

        return LstmNetwork(self, num_words)

    @override
    def build(self, trainer: NetworkTrainer | None = None) -> Estimator:
        return LstmEstimator(self, trainer)


class LstmEstimator(NetworkEstimator):
    """Has an LSTM trained."""

    cfg: LstmConfig
