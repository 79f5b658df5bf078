"""The section `data` of a configuration: which speech, and what is good enough to be used."""

from typing import Literal

from pydantic import Field, model_validator

from configurable.configuration import Configuration
from speech.features.augment import PauseConfig
from speech.text import NormalizerConfig
from tasks.dataset.policies import DuplicatesConfig
from tasks.dataset.sources import SourceConfig
from tasks.dataset.speeds import Speeds


class DataConfig(Configuration):
    """Which speech, and what is good enough to be used."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Corpora, in order; a later utterance with an id that came before is quarantined."""
    sample_rate: int = Field(default=16000, ge=4000, le=96000)
    """Rate that all audio is brought to, Hz."""
    min_seconds: float = Field(default=0.1, ge=0)
    """Shorter utterances are quarantined."""
    max_seconds: float = Field(default=30.0, gt=0)
    """Longer utterances are quarantined."""
    silence_db: float = -70.0
    """Utterances whose level is below this (RMS, dB of full scale) are quarantined as silent."""
    normalizer: NormalizerConfig = NormalizerConfig()
    """How transcripts are normalized."""
    valid_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of the utterances that a split gives to validation, if no source does. If all utterances have a set and
    none is for validation, it is taken out of what corpora, not sources, call `train`."""
    test_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of the utterances that a split gives to test, if no source does."""
    split_by: Literal["speaker", "utterance"] = "speaker"
    """`speaker` keeps the sets' speakers apart; `utterance` does not."""
    speaker_overlap: Literal["warn", "allow", "refuse"] = "warn"
    """Speakers of the training set (or a fold) in another set: `warn` names them, `allow` says that they are meant to
    be there (as `split_by: utterance` does), `refuse` ends the run."""
    stratify: tuple[str, ...] = ()
    """Columns of the manifest that every set of a split has its share of, such as `domain`, `duration`, `speaker`."""
    folds: int = Field(default=0, ge=0, le=100)
    """Number of folds for cross-validation (`starling run --folds`); 0 makes none."""
    fold: int = Field(default=0, ge=0, le=100)
    """The fold that this run is tested on, from 1; the others are its training set."""
    duplicates: DuplicatesConfig = DuplicatesConfig()
    """What becomes of speech that comes twice, and of speech that training and test sets share."""
    max_quarantined: float = Field(default=0.05, ge=0, le=1)
    """The run stops if a larger share of the utterances is quarantined."""
    speeds: Speeds = ()
    """The training set has copies of its utterances at these speeds, such as 0.9 and 1.1 (pitch follows), each as
    another speaker's."""
    lone_copies: float = Field(default=0.0, ge=0, le=1)
    """Share of these copies that are normalized and adapted alone, each as a speaker of its own, as single recordings
    are in recognition."""
    pauses: PauseConfig | None = None
    """Pauses around training utterances and their copies, for targets that are aligned to frames: these cannot follow
    `train.augment.pauses`, which draws others in each epoch."""

    @model_validator(mode="after")
    def _check_shares(self) -> "DataConfig":
        if not self.folds and self.valid_share + self.test_share >= 1:
            raise ValueError(
                f"valid_share {self.valid_share:g} and test_share {self.test_share:g} leave nothing to train on: "
                "together they must be less than 1"
            )
        return self

    @model_validator(mode="after")
    def _check_folds(self) -> "DataConfig":
        if self.folds == 1 or self.fold > self.folds:
            raise ValueError(f"folds {self.folds}, fold {self.fold}: give 2 folds or more, and one of them")
        if self.folds and self.speeds:
            raise ValueError("folds are tested on, too, so they have no copies at other speeds: leave out speeds")
        if self.folds and any(source.share < 1 or source.min_confidence for source in self.sources):
            raise ValueError(
                "folds are tested on, too, so all of their utterances are used: leave out sources.share and "
                "sources.min_confidence"
            )
        if self.folds and self.pauses is not None:
            raise ValueError("folds are tested on, too, so they get no pauses: leave out pauses")
        if self.lone_copies and not self.speeds:
            raise ValueError("lone_copies is a share of the copies at other speeds: give speeds, or leave it out")
        if "speaker" in self.stratify and self.split_by == "speaker":
            raise ValueError("stratify names 'speaker', which needs split_by: utterance")
        return self
