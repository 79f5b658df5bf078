"""Configuration of the stage restore, and what it needs of the rest."""

from pydantic import Field

from configurable.configuration import Configuration
from recognition.system import SystemConfig
from training.config import TrainConfig


class RestoreConfig(Configuration):
    """Transcripts in the written form of the model that training begins with: capitals, punctuation, digits."""

    most_errors: float = Field(default=0.5, ge=0, le=1)
    """Word error rate of the model on an utterance above which what it has written is not used: the transcript then
    only gets a capital and a full stop."""


def check_restore(restore: RestoreConfig | None, system: SystemConfig, train: TrainConfig) -> None:
    """Check that there is a model that writes as people do, and that is trained.

    Raises:
        ValueError: If not; the message names the remedy.
    """
    if restore is None:
        return
    if not system.writes:
        raise ValueError(
            "restore gives transcripts capitals, punctuation and digits, which only Whisper's decoder network writes: "
            "set recognizer to {kind: attention, ctc: false, decoder_network: whisper}, or remove restore"
        )
    if not train.epochs:
        raise ValueError(
            "restore makes texts to train on, and train.epochs is 0: train for an epoch, or remove restore"
        )
