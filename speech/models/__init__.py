"""Acoustic models, which put out tokens or tied states, and the registry of their configurations, which build them.

    model = build_model(ConformerConfig(layers=4), num_features=80, vocab_size=30)

To add a model, add a file with its configuration, whose `build` imports the network from a file in `networks`, and a
line in `MODELS`. Configurations load without torch, networks do not.
"""

from speech.models.blstm import BlstmConfig
from speech.models.config import ModelConfig
from speech.models.conformer import ConformerConfig
from speech.models.pretrained import PretrainedConfig
from speech.models.registry import MODELS, ModelChoice, build_model
from speech.models.tdnn import TdnnConfig
from speech.models.wav2vec2 import Wav2Vec2Config
from speech.models.whisper import WhisperConfig

__all__ = [
    "MODELS",
    "BlstmConfig",
    "ConformerConfig",
    "ModelChoice",
    "ModelConfig",
    "PretrainedConfig",
    "TdnnConfig",
    "Wav2Vec2Config",
    "WhisperConfig",
    "build_model",
]
