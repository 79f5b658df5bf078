"""Objectives: what training minimizes.

    objective = build_objective(CtcConfig())
    losses, unalignable = objective.losses(log_probs, frames, batch)

A new objective is one file with its configuration beside `ctc.py`, and one line in `OBJECTIVES`.
"""

from typing import Annotated

from configurable.choices import OneOf
from speech.objectives.attention import AttentionConfig, JointAttention
from speech.objectives.base import Objective, ObjectiveConfig, Targets
from speech.objectives.ctc import Ctc, CtcConfig
from speech.objectives.frame_cross_entropy import FrameCrossEntropy, FrameCrossEntropyConfig
from speech.objectives.transducer import JointTransducer, TransducerConfig

__all__ = [
    "OBJECTIVES",
    "AttentionConfig",
    "Ctc",
    "CtcConfig",
    "FrameCrossEntropy",
    "FrameCrossEntropyConfig",
    "JointAttention",
    "JointTransducer",
    "Objective",
    "ObjectiveChoice",
    "ObjectiveConfig",
    "Targets",
    "TransducerConfig",
    "build_objective",
]

OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "ctc": CtcConfig,
    "frame_cross_entropy": FrameCrossEntropyConfig,
    "attention": AttentionConfig,
    "transducer": TransducerConfig,
}
ObjectiveChoice = Annotated[ObjectiveConfig, OneOf(OBJECTIVES, "ctc")]
"""A field that takes the configuration of any objective."""


def build_objective(cfg: ObjectiveConfig) -> Objective:
    """Makes the objective that the configuration asks for."""
    return cfg.build()
