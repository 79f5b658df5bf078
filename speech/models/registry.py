"""Which models, decoder networks and predictors there are: a new one is a file here, its network, and a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from configurable.choices import OneOf
from speech.models.blstm import BlstmConfig
from speech.models.config import ModelConfig
from speech.models.conformer import ConformerConfig
from speech.models.decoder_networks import DecoderNetworkConfig
from speech.models.lstm import LstmEncoderConfig
from speech.models.predictors import LstmPredictorConfig, PredictorConfig, StatelessPredictorConfig
from speech.models.tdnn import TdnnConfig
from speech.models.transformer_decoder import TransformerDecoderConfig
from speech.models.wav2vec2 import Wav2Vec2Config
from speech.models.whisper import WhisperConfig
from speech.models.whisper_decoder import WhisperDecoderConfig

if TYPE_CHECKING:
    from speech.models.networks.base import AcousticModel

MODELS: dict[str, type[ModelConfig]] = {
    "blstm": BlstmConfig,
    "conformer": ConformerConfig,
    "lstm": LstmEncoderConfig,
    "tdnn": TdnnConfig,
    "wav2vec2": Wav2Vec2Config,
    "whisper": WhisperConfig,
}
ModelChoice = Annotated[ModelConfig, OneOf(MODELS, "conformer")]
"""A field that takes the configuration of any of them."""
ModelOption = Annotated[ModelConfig | None, OneOf(MODELS, "conformer", optional=True)]
"""As `ModelChoice`, or None."""

DECODER_NETWORKS: dict[str, type[DecoderNetworkConfig]] = {
    "transformer": TransformerDecoderConfig,
    "whisper": WhisperDecoderConfig,
}
DecoderNetworkChoice = Annotated[DecoderNetworkConfig, OneOf(DECODER_NETWORKS, "transformer")]
"""A field that takes the configuration of any decoder network."""

PREDICTORS: dict[str, type[PredictorConfig]] = {
    "stateless": StatelessPredictorConfig,
    "lstm": LstmPredictorConfig,
}
PredictorChoice = Annotated[PredictorConfig, OneOf(PREDICTORS, "stateless")]
"""A field that takes the configuration of any predictor."""


def build_model(cfg: ModelConfig, num_features: int, vocab_size: int) -> AcousticModel:
    """An initialized acoustic model; see `ModelConfig.build`."""
    return cfg.build(num_features, vocab_size)
