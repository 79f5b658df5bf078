"""Which acoustic models there are."""

from speech.models.base import AcousticModel, ModelConfig
from speech.models.blstm import Blstm
from speech.models.conformer import Conformer

MODELS: dict[str, type[AcousticModel]] = {"blstm": Blstm, "conformer": Conformer}


def build_model(cfg: ModelConfig, num_features: int, vocab_size: int) -> AcousticModel:
    """An initialized acoustic model.

    Args:
        cfg: Kind and sizes.
        num_features: Width of a feature frame.
        vocab_size: Tokens, the blank included.
    """
    return MODELS[cfg.kind](cfg, num_features, vocab_size)
