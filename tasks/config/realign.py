"""Configuration of the stage realign, and what it needs of the rest."""

from collections.abc import Callable

from pydantic import Field

from configurable.configuration import Configuration
from recognition.system import SystemConfig
from speech.hmm.config import AlignConfig
from speech.objectives import ObjectiveConfig


class RealignConfig(Configuration):
    """Alignment with a network that was trained before: its states replace those of the GMM-HMM's alignments."""

    model: str = Field(min_length=1)
    """A recognizer that was trained on alignments of the same section `align`: `models:/NAME@ALIAS`,
    `models:/NAME/VERSION`, or a bundle's folder."""
    acoustic_scale: float = Field(default=0.3, gt=0)
    """Weight of the log likelihoods beside the transitions."""
    beam: float = Field(default=20.0, ge=0)
    """Beam of the search, at the scale of the scaled log-likelihoods; 0 disables it."""
    retry_beam: float = Field(default=80.0, ge=0)
    """Beam of the second attempt for utterances that fail."""

    def with_files(self, change: Callable[[str], str]) -> "RealignConfig":
        """This configuration with another path of the bundle's folder."""
        if self.model.startswith("models:/"):
            return self
        return self.model_copy(update={"model": change(self.model)})


def check_realign(
    realign: RealignConfig | None, align: AlignConfig | None, system: SystemConfig, objective: ObjectiveConfig
) -> None:
    """Check that there is something to align again, and that training uses it.

    Raises:
        ValueError: If not; the message names the remedy.
    """
    if realign is None:
        return
    if align is None:
        raise ValueError("realign changes the alignments of the section align, and there is none: add it")
    if system.is_trained and (system.targets != "states" or objective.alignments_folder):
        raise ValueError(
            "realign gives training the states of alignments, which it does not use: set train.objective to "
            "frame_cross_entropy without alignments, or remove realign"
        )
