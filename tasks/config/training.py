"""How acoustic models are trained: the engine's configuration, the objective, and the training data's augmentation."""

from pydantic import model_validator

from recognition.data.segments import SegmentConfig
from speech.features.augment import AugmentConfig
from speech.objectives import CtcConfig, ObjectiveChoice
from training.config import TrainConfig


class AcousticTrainConfig(TrainConfig):
    """Training of one acoustic model."""

    objective: ObjectiveChoice = CtcConfig()
    """What is minimized."""
    segments: SegmentConfig | None = None
    """Train on segments of utterances: `max_batch` counts these. Needs stored features and an objective of frames."""
    augment: AugmentConfig = AugmentConfig()
    """Augmentation of training audio and features; validation and test data are not augmented."""

    @model_validator(mode="after")
    def _check_targets(self) -> "AcousticTrainConfig":
        needs = self.objective.needs
        if self.traits.split and needs != "tokens":
            raise ValueError(
                f"{self.strategy.kind} splits the model, and its last part gets transcripts only, not the {needs} that "
                f"{self.objective.kind} needs: use another strategy"
            )
        if needs == "states":
            self.augment.refuse_insertions()
        elif self.segments:
            raise ValueError(
                f"segments have no transcripts, which {self.objective.kind} needs: leave segments out, or use "
                "objective frame_cross_entropy"
            )
        return self
