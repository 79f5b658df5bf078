"""Objectives: what training minimizes.

    objective = build_objective(CtcConfig())
    losses, unalignable = objective.losses(log_probs, frames, batch)

A new objective is one file with its configuration beside `ctc.py`, and one line in `OBJECTIVES`.
"""

from typing import Annotated

from configurable.choices import OneOf
from speech.decoding import DECODERS
from speech.objectives.base import Objective, ObjectiveConfig, Targets
from speech.objectives.ctc import Ctc, CtcConfig
from speech.objectives.frame_cross_entropy import FrameCrossEntropy, FrameCrossEntropyConfig

__all__ = [
    "OBJECTIVES",
    "Ctc",
    "CtcConfig",
    "FrameCrossEntropy",
    "FrameCrossEntropyConfig",
    "Objective",
    "ObjectiveChoice",
    "ObjectiveConfig",
    "Targets",
    "build_objective",
    "check_decoder",
    "objective_of",
]

OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "ctc": CtcConfig,
    "frame_cross_entropy": FrameCrossEntropyConfig,
}
ObjectiveChoice = Annotated[ObjectiveConfig, OneOf(OBJECTIVES, "ctc")]
"""A field that takes the configuration of any objective."""


def build_objective(cfg: ObjectiveConfig) -> Objective:
    """Makes the objective that the configuration asks for."""
    return cfg.build()


def objective_of(decoder: str) -> str:
    """A kind of objective whose models a kind of decoder reads."""
    return next(kind for kind, objective in OBJECTIVES.items() if objective.outputs == DECODERS[decoder].reads)


def check_decoder(cfg: ObjectiveConfig, decoder: str) -> None:
    """See that a kind of decoder reads the outputs of models trained with an objective.

    Raises:
        ValueError: It does not.
    """
    decoders = [kind for kind, decoder in DECODERS.items() if decoder.reads == cfg.outputs]
    if decoder not in decoders:
        raise ValueError(
            f"decode.kind is {decoder}, which does not read what models trained with {cfg.kind} say: use "
            f"{' or '.join(decoders)}"
        )
