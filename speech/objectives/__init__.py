"""Objectives: what training minimizes.

    objective = build_objective(ObjectiveConfig(kind="ctc"))
    losses, unalignable = objective.losses(log_probs, frames, batch)

A new objective is one file beside `ctc.py` and one line in `OBJECTIVES`.
"""

from speech.objectives.base import Objective, ObjectiveConfig, Targets
from speech.objectives.ctc import Ctc

__all__ = ["OBJECTIVES", "Ctc", "Objective", "ObjectiveConfig", "Targets", "build_objective", "check_decoder"]

OBJECTIVES: dict[str, type[Objective]] = {"ctc": Ctc}


def build_objective(cfg: ObjectiveConfig) -> Objective:
    """Makes the objective that the configuration asks for."""
    return OBJECTIVES[cfg.kind]()


def check_decoder(cfg: ObjectiveConfig, decoder: str) -> None:
    """See that a kind of decoder reads the outputs of models trained with an objective.

    Raises:
        ValueError: It does not.
    """
    decoders = OBJECTIVES[cfg.kind].decoders
    if decoder not in decoders:
        raise ValueError(
            f"decode.kind is {decoder}, which does not read what models trained with {cfg.kind} say: use "
            f"{' or '.join(decoders)}"
        )
