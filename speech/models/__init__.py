"""Acoustic models, which put out tokens or tied states, and the registry of their configurations, which build them.

    model = build_model(ConformerConfig(layers=4), num_features=80, vocab_size=30)

To add a model, add a file with its configuration, whose `build` imports the network from a file in `networks`, and a
line in `MODELS`; decoder networks, which attend to a model's hidden frames, are listed in `DECODER_NETWORKS`, and
predictors, which a transducer joins with them, in `PREDICTORS`.
Configurations load without torch, networks do not.
"""

from speech.models.blstm import BlstmConfig, LatencyConfig
from speech.models.config import ModelConfig
from speech.models.conformer import ChunkConfig, ConformerConfig
from speech.models.decoder_networks import DecoderNetworkConfig
from speech.models.lstm import LstmEncoderConfig
from speech.models.predictors import LstmPredictorConfig, PredictorConfig, StatelessPredictorConfig
from speech.models.pretrained import PretrainedConfig
from speech.models.registry import (
    DECODER_NETWORKS,
    MODELS,
    PREDICTORS,
    DecoderNetworkChoice,
    ModelChoice,
    ModelOption,
    PredictorChoice,
    build_model,
)
from speech.models.tdnn import TdnnConfig
from speech.models.transformer_decoder import TransformerDecoderConfig
from speech.models.wav2vec2 import Wav2Vec2Config
from speech.models.whisper import WhisperConfig
from speech.models.whisper_decoder import WhisperDecoderConfig

__all__ = [
    "DECODER_NETWORKS",
    "MODELS",
    "PREDICTORS",
    "BlstmConfig",
    "ChunkConfig",
    "ConformerConfig",
    "DecoderNetworkChoice",
    "DecoderNetworkConfig",
    "LatencyConfig",
    "LstmEncoderConfig",
    "LstmPredictorConfig",
    "ModelChoice",
    "ModelConfig",
    "ModelOption",
    "PredictorChoice",
    "PredictorConfig",
    "PretrainedConfig",
    "StatelessPredictorConfig",
    "TdnnConfig",
    "TransformerDecoderConfig",
    "Wav2Vec2Config",
    "WhisperConfig",
    "WhisperDecoderConfig",
    "build_model",
]
