"""How language models that are networks are trained: the engine's configuration with other defaults."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from configurable.choices import OneOf
from speech.lm import LmConfig, NetworkConfig
from training.config import OPTIMIZERS, AdamWConfig, OptimizerConfig, ScheduleConfig, TrainConfig


class LmTrainConfig(TrainConfig):
    """Training of a language model; a word counts as a second of audio, a block of sentences as an utterance."""

    epochs: int = Field(default=10, ge=1)
    """Passes over the text."""
    batch_seconds: float = Field(default=2048.0, gt=0)
    """Maximum number of words in a batch over all learners, padding included."""
    optimizer: Annotated[OptimizerConfig, OneOf(OPTIMIZERS, "adamw")] = AdamWConfig()
    """Optimizer and its constants."""
    schedule: ScheduleConfig = ScheduleConfig(kind="cosine", warmup_epochs=0.5)
    """Learning rate over training."""

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if self.traits.split:
            raise ValueError(f"{self.strategy.kind} splits acoustic models, not language models: use another strategy")
        if self.lora:
            raise ValueError(
                "lora adapts another model's weights, and language models begin with random ones: remove lora"
            )
        if self.launch.kind != "local":
            raise ValueError(
                f"launch.kind is {self.launch.kind}, but language models are trained on one machine: use local"
            )
        return self


def lm_training(train: LmTrainConfig | None) -> LmTrainConfig:
    """How a network is trained: the section `lm_train`, or the defaults without it."""
    return train or LmTrainConfig()


def check_lm_training(lm: LmConfig | None, rescoring: LmConfig | None, train: LmTrainConfig | None) -> None:
    """Check that a training that is configured has something to train: one of the two language models.

    Raises:
        ValueError: It has not.
    """
    if train is not None and not any(isinstance(model, NetworkConfig) for model in (lm, rescoring)):
        kind = lm.kind if lm else "none"
        raise ValueError(f"lm_train trains language models that are networks, and lm.kind is {kind}: remove lm_train")
