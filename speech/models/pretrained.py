"""Configuration of encoders that others have trained, as the library `transformers` builds them.

    model: {kind: whisper, source: models/whisper-base}

`source` is where configuration and weights come from when a training starts: a folder or the URL of one on object
storage, in Hugging Face's format (`config.json`, `model.safetensors`), or a name on the Hugging Face hub with the
`revision` that it is pinned to. `recognition.pretrained` reads it. The configuration goes into `encoder`, so that a
finished model is built without its source, and its weights are those of its own bundle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from typing_extensions import override

from speech.models.config import ModelConfig

if TYPE_CHECKING:
    from speech.features.config import FeatureConfig

_OF_THE_SOURCE = ("dim", "layers", "subsampling", "channels")
_LARGEST = 200_000
"""Characters of a configuration at most; those of known encoders are far shorter."""
_NOT_OF_THE_ENCODER = frozenset(
    {"architectures", "auto_map", "dtype", "torch_dtype", "id2label", "label2id", "quantization_config"}
    | {"transformers_version", "task_specific_params", "suppress_tokens", "begin_suppress_tokens"}
)
"""Fields of a configuration that are left out: of other parts of the model, or of how it is loaded."""
_PINNED = 40
"""Hexadecimal digits of a commit."""


class PretrainedConfig(ModelConfig, ABC):
    """What all pretrained encoders have in common.

    Attributes:
        sample_rate: Of the audio that all of them were trained on, in Hz.
        features: Kind of features that they read.
        model_types: Their architectures by the `model_type` of `config.json`, with the prefix of the class names in
            `transformers`.
    """

    packages: ClassVar[tuple[str, ...]] = ("transformers",)
    extra: ClassVar[str] = "pretrained"
    free_fields: ClassVar[frozenset[str]] = frozenset({"dropout", "source", "revision", "licence", "trained_on"})
    subsamplings: ClassVar[tuple[int, ...]] = (2,)
    sample_rate: ClassVar[int] = 16000
    features: ClassVar[str]
    model_types: ClassVar[dict[str, str]]

    source: str = ""
    """Folder or URL of the pretrained model in Hugging Face's format (config.json, model.safetensors), or its name on
    the Hugging Face hub, if `revision` is given. Not read if training begins with the model that `train.init` names."""
    revision: str = ""
    """Commit (40 hexadecimal digits) of a model on the Hugging Face hub; empty for folders and URLs."""
    licence: str = ""
    """Licence of the pretrained model, for the model card; by default what its own card (README.md) states."""
    trained_on: str = ""
    """What the pretrained model was trained on, for the model card; by default the data sets that its own names."""
    encoder: dict[str, Any] = Field(default_factory=dict)
    """Configuration of the encoder as `transformers` reads it; taken from the source."""

    @field_validator("revision")
    @classmethod
    def _check_revision(cls, revision: str) -> str:
        if revision and (len(revision) != _PINNED or set(revision) - set("0123456789abcdef")):
            raise ValueError(
                f"{revision!r} is not a commit, and branches and tags can change: give the 40 hexadecimal digits of one"
            )
        return revision

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if len(str(self.encoder)) > _LARGEST:
            raise ValueError("encoder is too large for the configuration of an encoder: remove it, or name a source")
        if self.encoder:
            return self
        for name in _OF_THE_SOURCE:
            if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} comes with the pretrained model: remove it")
        return self

    @override
    def with_paths(self, change: Callable[[str], str]) -> Self:
        return self if self.revision else self.model_copy(update={"source": change(self.source)})

    @override
    def check_inputs(self, features: FeatureConfig, sample_rate: int) -> None:
        if sample_rate != self.sample_rate:
            raise ValueError(
                f"data.sample_rate is {sample_rate}, but pretrained {self.kind} models heard {self.sample_rate} Hz: "
                f"set data.sample_rate={self.sample_rate} (audio is resampled)"
            )
        if features.kind != self.features:
            raise ValueError(
                f"features.kind is {features.kind}, but model {self.kind} reads {self.features}: set "
                f"features.kind={self.features}"
            )
        wanted = {"cmvn": "none", "delta_order": 0, "splice_left": 0, "splice_right": 0, "stride": 1}
        for name, value in wanted.items():
            if getattr(features, name) != value:
                raise ValueError(
                    f"features.{name} is {getattr(features, name)}, but model {self.kind} was trained on features as "
                    f"they are: set features.{name}={value}"
                )

    def check_preprocessor(self, features: FeatureConfig, preprocessor: Mapping[str, Any]) -> None:
        """Check that features are what the pretrained model's `preprocessor_config.json` describes.

        Args:
            features: Their configuration, which has passed `check_inputs`.
            preprocessor: The file's content; empty if there is none.

        Raises:
            ValueError: They are not.
        """
        rate = preprocessor.get("sampling_rate", self.sample_rate)
        if rate != self.sample_rate:
            raise ValueError(
                f"the pretrained model was trained at {rate} Hz, and only {self.sample_rate} Hz are supported"
            )

    def with_encoder(self, config: Mapping[str, Any]) -> Self:
        """This configuration with the sizes of a pretrained encoder.

        Args:
            config: Content of its `config.json`.

        Raises:
            ValueError: It describes no encoder that this kind of model supports.
        """
        kind = str(config.get("model_type", ""))
        if kind not in self.model_types:
            other = _kind_of(kind)
            remedy = f"use model.kind={other}" if other else "choose another model"
            raise ValueError(
                f"its model_type is {kind or 'not stated'}, but model {self.kind} supports "
                f"{', '.join(self.model_types)}: {remedy}"
            )
        encoder = {name: value for name, value in config.items() if name not in _NOT_OF_THE_ENCODER and name[0] != "_"}
        try:
            sizes = self._sizes(encoder)
        except (KeyError, TypeError) as error:
            raise ValueError(f"its config.json lacks the size {error}") from error
        try:
            return type(self).model_validate({**self.model_dump(), **sizes})
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}" for mistake in error.errors())
            raise ValueError(f"its config.json has sizes that are none ({wrong})") from error

    @property
    @abstractmethod
    def num_features(self) -> int:
        """Width of the frames that the encoder reads."""

    @abstractmethod
    def _sizes(self, encoder: dict[str, Any]) -> dict[str, Any]:
        """Values of the fields that tell the encoder's sizes, from a `config.json`; `encoder` is one of them.

        Raises:
            KeyError: A size is missing.
            ValueError: The encoder has parts that are not supported.
        """

    @abstractmethod
    def own_name(self, name: str) -> str | None:
        """The name in our network of a tensor in the pretrained model's file; None for one of another part."""

    def check_built(self) -> None:
        """Check that the encoder's configuration is known.

        Raises:
            ValueError: The source has not been read.
        """
        if not self.encoder:
            what = self.source or f"this {self.kind} model, which names no source,"
            raise ValueError(f"the sizes of {what} are unknown: it must be read first (recognition.pretrained)")


def _kind_of(model_type: str) -> str:
    """The kind of pretrained model that supports an architecture; empty if none does."""
    kinds = {kind: cfg for cfg in PretrainedConfig.__subclasses__() for kind in cfg.model_types}
    return str(kinds[model_type].model_fields["kind"].default) if model_type in kinds else ""


def import_transformers() -> Any:
    """The library `transformers`, imported now: that takes seconds."""
    return import_module("transformers")


@contextmanager
def describing() -> Iterator[None]:
    """Context in which `transformers` builds an encoder: turns its errors into a `ValueError`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"transformers builds no encoder of this configuration: {error!r}") from error
