"""Acoustic models with a CTC output, and the registry of their configurations, which build them.

    model = build_model(ConformerConfig(layers=4), num_features=80, vocab_size=30)

To add a model, add a file with the model and its configuration, and a line in `MODELS`.
"""

from speech.models.blstm import BlstmConfig
from speech.models.config import ModelConfig
from speech.models.conformer import ConformerConfig
from speech.models.registry import MODELS, ModelChoice, build_model

__all__ = ["MODELS", "BlstmConfig", "ConformerConfig", "ModelChoice", "ModelConfig", "build_model"]
