"""Which acoustic models there are."""

from typing import Annotated

from speech.choices import OneOf
from speech.models.base import AcousticModel, ModelConfig
from speech.models.blstm import Blstm
from speech.models.conformer import Conformer

MODELS: dict[str, type[AcousticModel]] = {"blstm": Blstm, "conformer": Conformer}
ModelChoice = Annotated[ModelConfig, OneOf({kind: model.config for kind, model in MODELS.items()}, "conformer")]
"""A field that takes the configuration of any of them."""


def build_model(cfg: ModelConfig, num_features: int, vocab_size: int) -> AcousticModel:
    """An initialized acoustic model.

    Args:
        cfg: Kind and sizes.
        num_features: Width of a feature frame.
        vocab_size: Tokens, the blank included.
    """
    return MODELS[cfg.kind](cfg, num_features, vocab_size)
