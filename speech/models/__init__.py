"""Acoustic models with a CTC output, and the registry that builds them from a configuration."""

from speech.models.base import AcousticModel, ModelConfig
from speech.models.registry import MODELS, build_model

__all__ = ["MODELS", "AcousticModel", "ModelConfig", "build_model"]
