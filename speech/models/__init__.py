"""Acoustic models with a CTC output, and the registry that builds them from a configuration.

    model = build_model(ConformerConfig(layers=4), num_features=80, vocab_size=30)

A new model is one file with its configuration beside `conformer.py`, and one line in `MODELS`.
"""

from speech.models.base import AcousticModel, ModelConfig
from speech.models.blstm import BlstmConfig
from speech.models.conformer import ConformerConfig
from speech.models.registry import MODELS, ModelChoice, build_model

__all__ = ["MODELS", "AcousticModel", "BlstmConfig", "ConformerConfig", "ModelChoice", "ModelConfig", "build_model"]
