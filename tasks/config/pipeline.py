"""The configuration of a pipeline: one model for YAML files, `--set`, and Prefect's parameter form.

The parts are defined beside what they configure (features, models, training, …); this module joins them, reads YAML,
applies overrides and turns a mistake into a message that names the field and the nearest right one.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from configurable.configuration import Configuration
from configurable.former_fields import former_fields
from devices.compute_threads import usable_cores
from recognition.system import SystemConfig
from recognition.systems import SystemOption, system_of
from speech.decoding import DecodeChoice, DecodeConfig, GreedyConfig
from speech.features import FeatureChoice, LogMelConfig
from speech.hmm.config import AlignConfig
from speech.lexicon import GraphemesConfig, LexiconChoice
from speech.lm import LmOption
from speech.models import ConformerConfig, ModelChoice, PretrainedConfig
from speech.tokens import TokenConfig
from tasks.config.adapted import check_features
from tasks.config.assignments import assign
from tasks.config.data import DataConfig
from tasks.config.decoding import TuneConfig, check_decoding, check_rescoring
from tasks.config.given import Place, find_given
from tasks.config.lm_training import LmTrainConfig, check_lm_training
from tasks.config.mistakes import choices, explained, listed
from tasks.config.model_names import is_model, registered_uri
from tasks.config.realign import RealignConfig, check_realign
from tasks.config.restore import RestoreConfig, check_restore
from tasks.config.training import AcousticTrainConfig, check_system
from tasks.config.yaml_text import parse_yaml
from tasks.dataset.policies import SlotsConfig
from tasks.dataset.sources import checked_name
from tasks.search.config import SearchConfig, check_search

_CLUSTER_WORKERS = 64


class ConfigError(ValueError):
    """A configuration has an unknown, ill-typed or contradictory field."""


class StorageConfig(Configuration):
    """Where stage outputs go, and how audio is packed."""

    url: str = ""
    """Object store: a folder, `s3://bucket/prefix`, `gs://…`, `az://…`, `memory://…`; default `objects` in the home."""
    shard_seconds: float = Field(default=600.0, gt=0)
    """Seconds of audio in a shard."""
    workers: int = Field(default=0, ge=0)
    """Threads that decode, resample and pack; 0 is one per core that the process may use."""
    credentials: str = ""
    """Name of a Prefect block `storage-credentials` with key and secret; by default the AWS_... variables count."""
    cache_gb: float = Field(default=50.0, gt=0)
    """Most gigabytes of local copies of remote shards; the least recently used leave first."""

    @field_validator("url")
    @classmethod
    def _no_credentials(cls, url: str) -> str:
        if re.search(r"://[^/]*@", url):
            raise ValueError("an object store URL must not carry credentials: set AWS_ACCESS_KEY_ID and the like")
        return url


def worker_count(configured: int) -> int:
    """Threads to use: the configured number, or one per core that this process may use."""
    return configured or usable_cores()


class RunnerConfig(Configuration):
    """Where shards are made, looked at and decoded."""

    kind: Literal["threads", "processes", "dask", "ray"] = "threads"
    """`threads` or `processes` of this machine; `dask` or `ray` on a cluster (packages prefect-dask, prefect-ray)."""
    address: str = ""
    """For `dask` and `ray`: the cluster's, such as tcp://head:8786 or ray://head:10001; empty starts one here."""
    workers: int = Field(default=0, ge=0)
    """Pieces at once; 0 is one per core of this process, or of the cluster."""
    wait_hours: float = Field(default=12.0, gt=0)
    """Most hours that a piece may take; a run that waits longer ends."""

    @model_validator(mode="after")
    def _check(self) -> "RunnerConfig":
        if self.address and self.kind in ("threads", "processes"):
            raise ValueError(f"kind {self.kind} works on this machine: leave address empty, or use kind dask or ray")
        return self

    @property
    def count(self) -> int:
        """Pieces at once; many on a cluster of unknown size."""
        return self.workers or (_CLUSTER_WORKERS if self.address else worker_count(0))

    @property
    def cluster(self) -> bool:
        """Whether the workers are those of Dask or Ray."""
        return self.kind in ("dask", "ray")

    @property
    def local(self) -> bool:
        """Whether the workers are threads of this process."""
        return self.kind == "threads"


class ScoreConfig(Configuration):
    """Which sets are scored, and how sure the result is."""

    sets: tuple[str, ...] = ()
    """Sets to decode and score; empty: every test set, or the validation set if there is no test set."""

    _former = former_fields(bootstrap=1000)


class ReportConfig(Configuration):
    """What the HTML report contains besides figures."""

    audio_mb: float = Field(default=2.0, ge=0)
    """Maximum size of the audio of the utterances with the most errors, in megabytes; 0 leaves audio out."""


class MonitorConfig(Configuration):
    """When what servers recognize counts as unlike the test sets: `starling monitor`."""

    logs: tuple[str, ...] = ()
    """Logs of servers (`starling serve --log`), or folders with them; by default `logs` in the data folder."""
    hours: float = Field(default=24.0, gt=0, le=24 * 366)
    """Length of the period, which ends now."""
    utterances: int = Field(default=100, ge=10)
    """Fewest utterances that are compared."""
    distance: float = Field(default=0.2, gt=0, le=1)
    """Smallest difference of confidences, lengths or words per second that counts: their Kolmogorov-Smirnov distance,
    the largest difference of the shares of utterances below a value."""
    rejected: float = Field(default=0.05, gt=0, le=1)
    """Smallest rise that counts of the share of inputs whose audio is refused, over that of the corpus."""
    significance: float = Field(default=0.01, ge=0.005, le=0.5)
    """A difference counts only if its p-value, corrected for the number of comparisons, is smaller."""


class RegisterConfig(Configuration):
    """How the model enters the registry."""

    model: str = ""
    """Registered model's name; by default the configuration's name."""
    significance: float = Field(default=0.05, gt=0, le=1)
    """A challenger replaces the champion only if its WER is lower, with a smaller p-value than this (paired test)."""
    promote: Literal["auto", "manual"] = "auto"
    """`auto` compares the new version with the champion at once; `manual` leaves that to `starling promote`."""

    accept_untrained: bool = False
    """Whether a model that has learned nothing may become the first champion; to try out a pipeline. It has learned
    nothing if its WER on the test sets is no lower than that of the same text for all their utterances."""

    first_max_wer: float = Field(default=1.0, gt=0)
    """Largest WER on the test sets with which a model becomes the first champion, as a fraction."""

    _check_model = field_validator("model")(checked_name)


class PipelineConfig(Configuration):
    """A whole pipeline: from a corpus to a registered recognizer."""

    model_config = ConfigDict(populate_by_name=True)

    name: str
    """Name of the experiment, and of the registered model unless `register.model` gives another."""
    seed: int = 1
    """Seed of everything random."""
    data: DataConfig
    """Which speech."""
    runner: RunnerConfig = RunnerConfig()
    """Where shards are made, looked at and decoded."""
    storage: StorageConfig = StorageConfig()
    """Where stage outputs go."""
    features: FeatureChoice = LogMelConfig()
    """What the acoustic model sees."""
    align: AlignConfig | None = None
    """The GMM-HMM that the stage `align` trains and aligns with; without this section there is no such stage."""
    recognizer: SystemOption = None
    """What is trained and recognizes; by default (`network`) the one that `train.objective` is for: `ctc`, `hybrid`,
    `attention` or `transducer`.
    `gmm` is the GMM-HMM of the stage `align`; then there is no stage `train`."""
    tokens: TokenConfig = TokenConfig()
    """What the acoustic model says."""
    model: ModelChoice = ConformerConfig()
    """The acoustic model."""
    train: AcousticTrainConfig = AcousticTrainConfig()
    """Training."""
    decode: DecodeChoice = GreedyConfig()
    """Decoding."""
    tune: TuneConfig | None = None
    """Chooses parameters of the decoder on the validation set; without this section they are as configured."""
    realign: RealignConfig | None = None
    """The stage `realign`, which aligns again with a network; without this section there is none."""
    restore: RestoreConfig | None = None
    """The stage `restore`, which gives transcripts the form in which the model writes; without it there is none."""
    lexicon: LexiconChoice = GraphemesConfig()
    """How words are pronounced."""
    lm: LmOption = None
    """The language model that the stage `lm` estimates; without this section there is no such stage."""
    rescoring: LmOption = None
    """The second language model, which the stage `rescoring` estimates, and with which the decoder ranks its best
    hypotheses again, as `decode.rescore_weight` and `decode.rescore_nbest` say; without this section there is none."""
    lm_train: LmTrainConfig | None = None
    """How a language model that is a network is trained; with the defaults unless given."""
    score: ScoreConfig = ScoreConfig()
    """Scoring."""
    register_as: RegisterConfig = Field(default=RegisterConfig(), alias="register")
    """Registration."""
    report: ReportConfig = ReportConfig()
    """The HTML report."""
    monitor: MonitorConfig = MonitorConfig()
    """How recognition by servers is watched."""
    slots: SlotsConfig = SlotsConfig()
    """What runs at the same time do about each other."""
    search: SearchConfig | None = None
    """What `starling search` tries to find better values of some fields; everything else ignores it."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name:
            raise ValueError("a name must not be empty")
        return checked_name(name)

    @field_validator("recognizer", mode="before")
    @classmethod
    def _of_objective(cls, value: Any) -> Any:
        return None if value == "network" else value

    @model_validator(mode="after")
    def _check_parts(self) -> "PipelineConfig":
        if lacking := self.system.lacking(self.model, self.align, self.lm):
            raise ValueError(lacking)
        check_system(self.system, self.train)
        if not (self.train.epochs or self.train.init or getattr(self.model, "source", "")):
            raise ValueError(
                "train.epochs is 0, which keeps the weights that a training begins with, and these are random: name a "
                "model in train.init or model.source, or train for an epoch"
            )
        check_features(self.features, self.align, self.system, self.train.objective)
        check_realign(self.realign, self.align, self.system, self.train.objective)
        check_restore(self.restore, self.system, self.train)
        if self.features.stored:
            self.train.augment.refuse_waves("features.stored", "set features.stored=false")
        elif self.features.in_shards:
            self.train.augment.refuse_waves(f"features.kind {self.features.kind}")
        if self.train.traits.split and self.train.learners > 1 and self.model.unsplit:
            raise ValueError(self.model.unsplit)
        self._check_model()
        self.system.check_decoder(self.decoder.kind)
        if self.tune is not None:
            self.system.require("tuning")
        check_decoding(self.decode, self.lm, self.tune, self.align is not None)
        if self.rescoring is not None:
            check_rescoring(self.decode, self.rescoring)
        check_lm_training(self.lm, self.rescoring, self.lm_train)
        if self.train.segments and (
            not self.features.in_shards or self.features.cmvn not in ("none", "global", "speaker")
        ):
            raise ValueError(
                "train.segments are cut from stored features, and too short for statistics of their own: set "
                "features.stored=true and features.cmvn to global, speaker or none"
            )
        if self.search is not None:
            check_search(self)
        return self

    def _check_model(self) -> None:
        """Check that the model fits the features, and what the training takes from other models."""
        pretrained, augment = isinstance(self.model, PretrainedConfig), self.train.augment
        self.model.check_inputs(self.features, self.data.sample_rate)
        if isinstance(self.model, PretrainedConfig) and not (
            self.model.source or self.model.encoder or self.train.init
        ):
            raise ValueError(
                f"model.source is empty, and model {self.model.kind} starts from a pretrained model: name its folder, "
                "URL, or name on the Hugging Face hub with a revision; or begin with another training's model by "
                "train.init"
            )
        if self.train.lora and not self.train.init and not pretrained:
            raise ValueError("train.lora adapts another model's weights: name it in train.init, or remove train.lora")
        masked = augment.enabled and augment.freq_masks and augment.freq_mask_bins
        if pretrained and self.features.kind == "waveform" and masked:
            raise ValueError(
                f"train.augment.freq_masks is {augment.freq_masks}, and would silence samples of every block, since "
                f"model {self.model.kind} reads samples: set train.augment.freq_masks=0"
            )

    def beginning_with(self, model: str) -> "PipelineConfig":
        """This configuration with another `train.init`; itself if `model` is empty."""
        return self.model_copy(update={"train": self.train.model_copy(update={"init": model})}) if model else self

    @property
    def system(self) -> SystemConfig:
        """What is trained, and recognizes."""
        return self.recognizer or system_of(self.train.objective)

    @property
    def decoder(self) -> DecodeConfig:
        """What the system decodes with."""
        return self.system.decoder(self.decode, self.align)

    @property
    def training_seed(self) -> int:
        """Seed of everything random in the training."""
        return self.seed if self.train.seed is None else self.train.seed

    @property
    def corpora(self) -> str:
        """The corpora's names, for the name of a run."""
        return ", ".join(dict.fromkeys(source.corpus_name for source in self.data.sources))

    @property
    def model_name(self) -> str:
        """Name in the registry."""
        return self.register_as.model or self.name


def load_config(path: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a YAML configuration and apply `a.b=value` overrides.

    Args:
        path: YAML file. Relative source paths count from its folder.
        overrides: Assignments; values are YAML (numbers, lists, `true`), list items are reached by number.

    Raises:
        ConfigError: If the file cannot be read or a field is wrong; the message lists every wrong field.
    """
    text, document = _read_yaml(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must be a mapping of fields, such as 'name: my-model'")
    try:
        assign(document, overrides, frozenset(choices(PipelineConfig)))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # their values may be secret
    changed = ", ".join(override.partition("=")[0].strip() for override in overrides)
    source = f"{path} (with --set for {changed})" if changed else str(path)

    def line_of(place: Place) -> str:  # only mistakes need lines: finding them reads the file's text again
        return find_given(text, path.name, overrides).line(place)

    return _anchor_paths(parse_config(document, source, line_of), path.resolve().parent)


def _read_yaml(path: Path) -> tuple[str, Any]:
    """A file's text and what it says."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, parse_yaml(text)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist: check the path, or let `starling init FOLDER` write a configuration"
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder: give a YAML file, or let `starling init {path}` write one") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = str(error).replace('in "<unicode string>", ', "in ")
        raise ConfigError(f"{path} cannot be read as YAML: {text}") from error


def parse_config(
    document: dict[str, Any], source: str = "the configuration", line_of: Callable[[Place], str] = lambda _: ""
) -> PipelineConfig:
    """Validate a configuration.

    Args:
        document: As YAML has it.
        source: Where it is from, for the message.
        line_of: `FILE:LINE` of a place in the document, for the message; empty if it is in no file.

    Raises:
        ConfigError: If a field is wrong; the message lists every wrong field and the nearest right one.
    """
    try:
        return PipelineConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(listed(source, explained(error, PipelineConfig, line_of))) from error


def _anchor_paths(config: PipelineConfig, folder: Path) -> PipelineConfig:
    """Make paths absolute, so that a scheduled run finds sources, noises, language models and so on from anywhere."""

    def absolute(name: str) -> str:
        path = Path(os.path.expandvars(name)).expanduser()
        return name if not name or "://" in name else str(path if path.is_absolute() else (folder / path).resolve())

    sources = tuple(source.model_copy(update={"path": absolute(source.path)}) for source in config.data.sources)
    data = config.data.model_copy(update={"sources": sources})
    objective = config.train.objective
    if objective.alignments_folder:
        objective = objective.model_copy(update={"alignments": absolute(objective.alignments_folder)})
    init = config.train.init
    if not registered_uri(init, config.model_name) or (init and is_model(folder / init)):
        init = absolute(init)
    train = config.train.model_copy(
        update={"augment": config.train.augment.with_files(absolute), "objective": objective, "init": init}
    )
    files: dict[str, Any] = {
        "decode": config.decode.with_files(absolute),
        "lexicon": config.lexicon.with_files(absolute),
        "model": config.model.with_paths(absolute),
    }
    align, lm = config.align and config.align.with_files(absolute), config.lm and config.lm.with_paths(absolute)
    rescoring = config.rescoring and config.rescoring.with_paths(absolute)
    realign = config.realign and config.realign.with_files(absolute)
    parts = {"data": data, "train": train, "align": align, "realign": realign, "lm": lm, "rescoring": rescoring}
    return config.model_copy(update=parts | files)
