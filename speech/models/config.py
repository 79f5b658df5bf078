"""Configuration of all acoustic models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from configurable.choices import Choice
from configurable.extras import install_remedy

if TYPE_CHECKING:
    from speech.features.config import FeatureConfig
    from speech.models.networks.base import AcousticModel


class ModelConfig(Choice, ABC):
    """Configuration that all acoustic models have.

    Attributes:
        can_be_split: Whether the network has `AcousticModel.stage`, which the strategy `pipeline` needs.
        streaming: Fields with which the network streams; None if it never does. The contract tests of streaming models
            go over all kinds that have some.
        subsamplings: Values of `subsampling` that the kind has networks for.
        packages: Packages that the network needs besides those of every model.
        extra: The extra that installs them.
        free_fields: Fields that do not change what weights mean: a training may begin with a model that has others.
        tiny: Fields of a network that trains in a moment: the tests of all models build it, whatever its kind.
    """

    can_be_split: ClassVar[bool] = False
    streaming: ClassVar[dict[str, Any] | None] = None
    subsamplings: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)
    packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    free_fields: ClassVar[frozenset[str]] = frozenset({"layers", "dropout"})
    tiny: ClassVar[dict[str, Any]] = {"dim": 16, "layers": 1, "subsampling": 2, "channels": 4}

    dim: int = Field(default=144, ge=8)
    """Width: model dimension of a Conformer or TDNN, cells per direction of a BLSTM."""
    layers: int = Field(default=8, ge=1)
    """Encoder layers."""
    subsampling: Literal[1, 2, 4, 8] = 4
    """Feature frames per output frame. An utterance needs at least as many output frames as tokens."""
    channels: int = Field(default=32, ge=1)
    """Channels of the subsampling convolutions."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout probability throughout the encoder."""

    @property
    def halvings(self) -> int:
        """How often the front end halves the number of frames; each halving rounds up."""
        return self.subsampling.bit_length() - 1

    @property
    def streams(self) -> bool:
        """Whether the network goes on from chunk to chunk, with a state of bounded size."""
        return False

    @property
    def causal(self) -> bool:
        """Whether it was made to stream: its convolutions read no later frames, and features are those of a stream."""
        return self.streams

    @property
    def ahead(self) -> int:
        """Output frames after a frame, or after its chunk, that the frame's output reads in a stream."""
        return 0

    @property
    def streaming_remedy(self) -> str:
        """Why the network does not stream, with the remedy; follows the name of its kind."""
        return "reads whole utterances: train a conformer with model.chunk, or an lstm, to recognize speech as it comes"

    @property
    def max_frames(self) -> int:
        """Feature frames of the longest utterance that the network can read; 0 if it reads any."""
        return 0

    @property
    def min_frames(self) -> int:
        """Feature frames that even the shortest utterance is computed with, such as those of silence behind it."""
        return 0

    @property
    def unsplit(self) -> str:
        """Why the network cannot be split into stages, and the remedy; empty if it can."""
        if self.can_be_split:
            return ""
        return f"model {self.kind} cannot be split into stages: use another strategy than pipeline"

    def free_beside(self, source: ModelConfig) -> frozenset[str]:
        """Fields that may differ from those of a model of the same kind that training begins with."""
        return self.free_fields

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """This configuration with other paths of the files that it names; by default, it names none."""
        return self

    def check_packages(self) -> None:
        """Check that the packages are installed that the network needs, without importing them.

        Raises:
            ValueError: One is not; the message says what to install.
        """
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise ValueError(f"model {self.kind} needs the package {', '.join(missing)}: {install_remedy(self.extra)}")

    def check_inputs(self, features: FeatureConfig, sample_rate: int) -> None:
        """Check that the network can read some features; by default, it reads any, if it was not made to stream.

        Args:
            features: Their configuration.
            sample_rate: Of the waveforms, in Hz.

        Raises:
            ValueError: It cannot; the message names the field and the remedy.
        """
        if self.causal and (reason := features.whole_utterance):
            raise ValueError(f"model {self.kind} is to recognize speech as it comes, but {reason}")

    @abstractmethod
    def build(self, num_features: int, vocab_size: int) -> AcousticModel:
        """Make an initialized model.

        Torch modules are imported, or defined, in here: a configuration is read without torch. It must work on torch's
        device `meta`, too, with tensors for each layer: a file of weights is compared with the sizes first.

        Args:
            num_features: Width of a feature frame.
            vocab_size: Outputs: tokens, the blank included, or tied states.
        """


class ChunkedModelConfig(ModelConfig):
    """Configuration of a network that streams if it was trained for that: with the section `chunk`, of its own."""

    streaming: ClassVar[dict[str, Any] | None] = {"chunk": {}}
    why_unsplit: ClassVar[str]
    """Why a network with chunks cannot be split into stages, and the remedy."""
    if TYPE_CHECKING:
        chunk: Any

    @property
    @override
    def unsplit(self) -> str:
        return super().unsplit if self.chunk is None else self.why_unsplit

    @property
    @override
    def streams(self) -> bool:
        return self.chunk is not None

    @override
    def free_beside(self, source: ModelConfig) -> frozenset[str]:
        # sizes of chunks are those of training and recognition, but what a network that streams computes is another
        return self.free_fields | ({"chunk"} if self.streams and source.streams else set())

    @property
    @override
    def streaming_remedy(self) -> str:
        return "was trained without model.chunk, and needs whole utterances: train one with model.chunk={}"
