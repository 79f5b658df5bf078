"""How acoustic models are trained: the engine's configuration, the objective, and the training data's augmentation."""

from typing import Any, Literal

from configurable.addresses import address_content
from recognition.data.segments import SegmentConfig
from recognition.system import SystemConfig
from speech.features.augment import AugmentConfig
from speech.objectives import CtcConfig, ObjectiveChoice
from training.config import TrainConfig

_NOT_CONTENT = (
    *(
        "threads",
        "checkpoint_steps",
        "checkpoint_keep",
        "log_steps",
        "launch",
        "membership",
        "loader_threads",
        "loader_processes",
    ),
    *("max_unreadable", "machines_per_node", "compile", "cuda_graphs", "flat_bf16", "learner_metrics"),
    *("exchange.kind", "exchange.encrypt", "exchange.timeout_s", "exchange.chunk_kb", "exchange.daemons"),
    "strategy.newcomer",
    "objective.joint_mb",
    *("objective.alignments", "init"),  # their digests count
)
"""Fields that affect how training runs, but not its result."""


def training_content(train: TrainConfig) -> dict[str, Any]:
    """What an address holds of a training's configuration: the fields that affect its model."""
    return address_content(train, without=_NOT_CONTENT if train.traits.exchange else (*_NOT_CONTENT, "exchange"))


class AcousticTrainConfig(TrainConfig):
    """Training of one acoustic model."""

    objective: ObjectiveChoice = CtcConfig()
    """What is minimized."""
    segments: SegmentConfig | None = None
    """Train on segments of utterances: `max_batch` counts these. Needs stored features and an objective of frames."""
    augment: AugmentConfig = AugmentConfig()
    """Augmentation of training audio and features; validation and test data are not augmented."""
    init: str = ""
    """The model that training begins with: `models:/NAME@ALIAS`, `NAME@ALIAS`, `NAME/VERSION`, `@champion` (of this
    configuration's own model), or the folder or URL of a bundle or of a pretrained model in Hugging Face's format;
    empty: what `model.source` names, or random weights."""
    init_tokens: Literal["source", "extended", "data"] = "source"
    """Tokens with `init`: those of that model, these with new ones of the training transcripts behind them (not for
    `bpe`), or those of the training transcripts, as the section tokens says."""
    init_statistics: Literal["source", "data"] = "source"
    """Feature statistics with `init`: those of that model, or those of the training set."""
    seed: int | None = None
    """Seed of the training: of random weights, the order of utterances, and augmentation. By default the
    configuration's `seed`, which divides the data, too."""


def check_system(system: SystemConfig, train: AcousticTrainConfig) -> None:
    """Check that a system can be trained as configured.

    Raises:
        ValueError: If not; the message names the field and the remedy.
    """
    if not system.is_trained:
        return
    system.check_objective(train.objective)
    if not system.objectives and train.objective != CtcConfig():
        raise ValueError(f"recognizer is {system.kind}, which has a loss of its own: leave out train.objective")
    if train.traits.split and not system.can_be_split:
        raise ValueError(
            f"train.strategy: {train.strategy.kind} splits the model, and its last part gets transcripts only, which "
            f"do not train a recognizer of kind {system.kind}: use another strategy"
        )
    if system.targets == "states":
        train.augment.refuse_insertions()
    elif train.segments:
        raise ValueError(
            f"train.segments have no transcripts, which a recognizer of kind {system.kind} needs: leave segments out, "
            "or use train.objective frame_cross_entropy"
        )
