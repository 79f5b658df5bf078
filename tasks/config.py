"""The configuration of a pipeline: one model for YAML files, `--set`, and Prefect's parameter form.

The parts are defined beside what they configure (features, models, training, …); this module joins them, reads YAML,
applies overrides and turns a mistake into a message that names the field and the nearest right one.
"""

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from speech.decoding import DecodeConfig
from speech.features import FeatureConfig
from speech.models import ModelConfig
from speech.synthesis.corpus import SynthesisConfig
from speech.text import NormalizerConfig
from speech.tokens import TokenConfig
from training.config import TrainConfig

_MODEL_CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class ConfigError(ValueError):
    """A configuration has an unknown, ill-typed or contradictory field."""


def is_name(text: str) -> bool:
    """Whether a text can name a model, a set, an object and a metric alike."""
    return bool(_NAME.fullmatch(text))


def _checked_name(name: str) -> str:
    if name and not is_name(name):
        raise ValueError(f"{name!r}: use letters, digits, '.', '_' and '-', and begin with a letter or digit")
    return name


class SourceConfig(BaseModel):
    """One corpus, or one part of it."""

    model_config = _MODEL_CONFIG

    kind: Literal["librispeech", "kaldi", "table", "synthetic"]
    """Layout: `librispeech` folders, `kaldi` data folder, `table` (CSV, TSV, JSON lines), or `synthetic` speech."""
    path: str = ""
    """Folder or file; relative to the configuration file, and $VARIABLES are filled in. Not for `synthetic`."""
    corpus: str = ""
    """Name of the corpus, kept with each utterance; by default the path's last part."""
    set: str = ""
    """Set that its utterances belong to: `train`, `valid`, or any other name for a test set. Empty: the corpus' own
    split, or, if it brings none, a speaker-disjoint split by `valid_share` and `test_share`."""
    domain: str = ""
    """Domain, kept with each utterance."""
    language: str = "en"
    """Language code, kept with each utterance."""
    speakers: tuple[str, ...] = ()
    """Only these speakers; empty takes all."""
    exclude_speakers: tuple[str, ...] = ()
    """Not these speakers."""
    where: dict[str, str] = {}
    """For `table`: only rows whose columns have these values."""
    limit: int = Field(default=0, ge=0)
    """Only the first so many utterances; 0 takes all."""
    synthesis: SynthesisConfig | None = None
    """For `synthetic`: how much speech, by which voices."""

    _check_set = field_validator("set")(_checked_name)

    @model_validator(mode="after")
    def _check_path(self) -> "SourceConfig":
        if self.kind != "synthetic" and not self.path:
            raise ValueError(f"a source of kind {self.kind!r} needs a path")
        return self


class DataConfig(BaseModel):
    """Which speech, and what is good enough to be used."""

    model_config = _MODEL_CONFIG

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
    """Share of the utterances that a split gives to validation, if no source does."""
    test_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of the utterances that a split gives to test, if no source does."""
    split_by: Literal["speaker", "utterance"] = "speaker"
    """`speaker` keeps the sets' speakers apart; `utterance` does not."""
    max_quarantined: float = Field(default=0.05, ge=0, le=1)
    """The run stops if a larger share of the utterances is quarantined."""


class StorageConfig(BaseModel):
    """Where stage outputs go, and how audio is packed."""

    model_config = _MODEL_CONFIG

    url: str = ""
    """Object store: a folder, `s3://bucket/prefix`, `memory://`; by default `objects` in the data folder."""
    shard_seconds: float = Field(default=600.0, gt=0)
    """Seconds of audio in a shard."""
    workers: int = Field(default=0, ge=0)
    """Threads that decode, resample and pack; 0 is one per core."""

    @field_validator("url")
    @classmethod
    def _no_credentials(cls, url: str) -> str:
        if re.search(r"://[^/]*@", url):
            raise ValueError("an object store URL must not carry credentials: set AWS_ACCESS_KEY_ID and the like")
        return url


class ScoreConfig(BaseModel):
    """Which sets are scored, and how sure the result is."""

    model_config = _MODEL_CONFIG

    sets: tuple[str, ...] = ()
    """Sets to decode and score; empty: every test set, or the validation set if there is no test set."""
    bootstrap: int = Field(default=1000, ge=100)
    """Bootstrap samples behind the confidence intervals."""


class RegisterConfig(BaseModel):
    """How the model enters the registry."""

    model_config = _MODEL_CONFIG

    model: str = ""
    """Registered model's name; by default the configuration's name."""
    significance: float = Field(default=0.05, gt=0, le=1)
    """A challenger replaces the champion only if its WER is lower, with a smaller p-value than this (paired test)."""

    _check_model = field_validator("model")(_checked_name)


class PipelineConfig(BaseModel):
    """A whole pipeline: from a corpus to a registered recognizer."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, populate_by_name=True, protected_namespaces=()
    )

    name: str
    """Name of the experiment, and of the registered model unless `register.model` gives another."""
    seed: int = 1
    """Seed of everything random."""
    data: DataConfig
    """Which speech."""
    storage: StorageConfig = StorageConfig()
    """Where stage outputs go."""
    features: FeatureConfig = FeatureConfig()
    """What the acoustic model sees."""
    tokens: TokenConfig = TokenConfig()
    """What the acoustic model says."""
    model: ModelConfig = ModelConfig()
    """The acoustic model."""
    train: TrainConfig = TrainConfig()
    """Training."""
    decode: DecodeConfig = DecodeConfig()
    """Decoding."""
    score: ScoreConfig = ScoreConfig()
    """Scoring."""
    register_as: RegisterConfig = Field(default=RegisterConfig(), alias="register")
    """Registration."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name:
            raise ValueError("a name must not be empty")
        return _checked_name(name)

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
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must be a mapping of fields, such as 'name: my-model'")
    for assignment in overrides:
        _assign(document, assignment)
    return _anchor_paths(parse_config(document, str(path)), path.resolve().parent)


def parse_config(document: dict[str, Any], source: str = "the configuration") -> PipelineConfig:
    """Validate a configuration.

    Raises:
        ConfigError: If a field is wrong; the message lists every wrong field and the nearest right one.
    """
    try:
        return PipelineConfig.model_validate(document)
    except ValidationError as error:
        lines = [f"  {_explain(problem)}" for problem in _own_problems(error)]
        raise ConfigError(f"{source} has {len(lines)} wrong field(s):\n" + "\n".join(lines)) from error


def _assign(document: dict[str, Any], assignment: str) -> None:
    key, sign, text = assignment.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set {assignment!r}: write field=value, for example train.optimizer.lr=0.001")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {assignment!r}: {text!r} is no YAML value; quote it if it is text") from error
    *parents, last = key.strip().split(".")
    node: Any = document
    for name in parents:
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict):
            node = node.setdefault(name, {})
        else:
            raise ConfigError(f"--set {assignment!r}: there is no {name!r} to set a field of")
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"--set {assignment!r}: {'.'.join(parents)} has no field {last!r}")


def _anchor_paths(config: PipelineConfig, folder: Path) -> PipelineConfig:
    """Make source paths absolute, so that a scheduled run finds them from anywhere."""

    def anchored(source: SourceConfig) -> SourceConfig:
        if not source.path or "://" in source.path:
            return source
        path = Path(os.path.expandvars(source.path)).expanduser()
        return source.model_copy(update={"path": str(path if path.is_absolute() else (folder / path).resolve())})

    sources = tuple(anchored(source) for source in config.data.sources)
    return config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})


def _own_problems(error: ValidationError) -> list[Any]:
    """Problems without those that only echo a deeper one (a list counts as too short when an item of it is wrong)."""
    problems = error.errors()
    places = [problem["loc"] for problem in problems]
    return [p for p in problems if not any(len(q) > len(p["loc"]) and q[: len(p["loc"])] == p["loc"] for q in places)]


def _explain(problem: Any) -> str:
    location = [part for part in problem["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    field = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"{field}: there is no such field{_nearest(str(location[-1]), _siblings(location[:-1]))}"
    if problem["type"] == "missing":
        return f"{field}: this field is required"
    message = str(problem["msg"]).removeprefix("Value error, ")
    given = "" if problem["type"] == "value_error" else f" (given: {problem['input']!r})"
    return f"{field}: {message}{given}" if field else message


def _siblings(location: Sequence[str | int]) -> list[str]:
    """Field names at a place in the configuration."""
    model: Any = PipelineConfig
    for part in location:
        if isinstance(part, int):
            continue
        fields = {(f.alias or name): f.annotation for name, f in model.model_fields.items()}
        model = next((m for m in _models_in(fields.get(part)) if m), None)
        if model is None:
            return []
    return [f.alias or name for name, f in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterable[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models_in(part)


def _nearest(name: str, candidates: list[str]) -> str:
    initials = "".join(word[:1] for word in name.split("_"))
    if len(initials) > 1 and initials in candidates:  # learning_rate is lr
        return f"; did you mean {initials!r}?"
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(candidates)}" if candidates else ""
