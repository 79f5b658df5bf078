"""Acoustic models with a CTC output, and the registry of their configurations, which build them.

    model = build_model(ConformerConfig(layers=4), num_features=80, vocab_size=30)

A new model is one file with its configuration beside `conformer.py`, and one line in `MODELS`.
"""

from speech.models.blstm import BlstmConfig
from speech.models.config import ModelConfig
from speech.models.conformer import ConformerConfig
from speech.models.registry import MODELS, ModelChoice, build_model

__all__ = ["MODELS", "BlstmConfig", "ConformerConfig", "ModelChoice", "ModelConfig", "build_model"]
