"""A training job: the complete configuration of a training process, as a JSON file."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from recognition.bundle import BundleSpec
from speech.features.cmvn import CmvnStats
from speech.lm import LmSpec
from training.config import TrainConfig


class TrainJob(BaseModel):
    """What to train, on which data, and where to write the results."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    run: str
    """Identity of the training: the digest of all its inputs. A resume must have the same."""
    seed: int
    """Seed of initialization, batch order, dropout and augmentation."""
    train: TrainConfig
    """How to train."""
    spec: BundleSpec | LmSpec
    """What is trained: the contents of the finished bundle (features, tokens, model sizes, normalization), or a
    language model that is a network."""
    speakers: dict[str, dict[str, Any]] = {}
    """Feature statistics by speaker, for `cmvn: speaker`."""
    train_url: str
    """Store of the training set's index and shards."""
    valid_url: str
    """Store of the validation set's index and shards."""
    alignments_url: str = ""
    """Store of the sets' alignments, if the objective needs them: `train.parquet` and `valid.parquet`."""
    output_url: str
    """Store for checkpoints and the finished model."""
    journal: Path
    """Local file that metrics are appended to."""
    cache: Path
    """Local folder for copies of remote shards."""
    servers: tuple[str, ...] = ()
    """HOST:PORT of the parameter server's processes, set by the supervisor that starts them."""
    cache_bytes: int | None = Field(default=None, gt=0)
    """Limit of the cache in bytes; None uses the folder's own limit."""

    def speaker_stats(self) -> dict[str, CmvnStats]:
        """The speakers' statistics as objects."""
        return {name: CmvnStats.from_dict(stats) for name, stats in self.speakers.items()}
