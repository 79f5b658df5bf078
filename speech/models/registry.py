"""Registry of the acoustic models."""

from typing import Annotated

from speech.choices import OneOf
from speech.models.base import AcousticModel, ModelConfig
from speech.models.blstm import Blstm
from speech.models.conformer import Conformer

MODELS: dict[str, type[AcousticModel]] = {"blstm": Blstm, "conformer": Conformer}
ModelChoice = Annotated[ModelConfig, OneOf({kind: model.config for kind, model in MODELS.items()}, "conformer")]
"""A field that takes the configuration of any of them."""


def build_model(cfg: ModelConfig, num_features: int, vocab_size: int) -> AcousticModel:
    """Build a randomly initialized acoustic model.

    Args:
        cfg: Kind and sizes.
        num_features: Number of features per frame.
        vocab_size: Number of tokens, including the blank.
    """
    return MODELS[cfg.kind](cfg, num_features, vocab_size)
