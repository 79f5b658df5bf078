"""What the tasks of all systems share: their sets are shards, and what they save says how it was trained.

Those of networks that hear audio share a front end and augmentation, too, as do their recognizers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from configurable.configuration import Configuration
from configurable.lazy import torch
from devices.padding import frame_multiple, rounded_up
from recognition.bundle import BundleSpec
from recognition.initial_weights import InitialWeights
from recognition.recognizer import Recognizer
from speech.decoding import DecodeConfig
from speech.features.augment import AugmentConfig
from speech.features.cmvn import CmvnStats
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.reading import ShardReader

if TYPE_CHECKING:
    from torch import Tensor, nn

    from recognition.data.dataset import Batch, SpeechDataset
    from speech.models.networks.base import TrainableNetwork
    from speech.words import FrameTimes, Piece

E = TypeVar("E")


class SystemTaskConfig(Configuration):
    """What is trained, and on which data, see `training.learner.task.TaskConfig`."""

    spec: Any
    """What the finished model is described by; it saves the model."""
    train_url: str
    """Store of the training set's index and shards."""
    valid_url: str
    """Store of the validation set's index and shards."""

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the files that `save` writes, in the order in which they are published."""
        names: tuple[str, ...] = self.spec.members
        return names

    def open_set(
        self,
        name: Literal["train", "valid"],
        cache: Path,
        cache_bytes: int | None,
        quarantine: Callable[[int], ShardQuarantine],
        checked: bool = False,
    ) -> SpeechDataset:
        """Open the training or validation set, see `training.learner.task.TaskConfig`."""
        from recognition.data.dataset import SpeechDataset

        store = ObjectStore(self.train_url if name == "train" else self.valid_url)
        index = ShardIndex.read(store)
        reader = ShardReader(store, index, cache, cache_bytes)
        more = self._further(name, index)
        return SpeechDataset(index, reader, quarantine=quarantine(len(index)), checked=checked, **more)

    def _further(self, name: Literal["train", "valid"], index: ShardIndex) -> dict[str, Any]:
        """Further arguments of a set's `SpeechDataset`."""
        return {}

    def save(self, folder: Path, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write the model into a folder."""
        self.spec.model_copy(update={"provenance": {**self.spec.provenance, **about}}).save(folder, weights)


class SpeechTaskConfig(SystemTaskConfig):
    """Which network that hears audio is trained, and on which data."""

    spec: BundleSpec
    """The contents of the finished bundle: system, features, tokens, model sizes, normalization."""
    augment: AugmentConfig = AugmentConfig()
    """Augmentation of training audio and features."""
    speakers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Feature statistics by speaker, for `cmvn: speaker`."""
    initial: InitialWeights | None = None
    """The weights that training begins with; random ones without."""
    texts_url: str = ""
    """Store of transcripts in the model's written form, by set; empty if it learns to write them as they are."""

    def speaker_stats(self) -> dict[str, CmvnStats]:
        """The speakers' statistics as objects."""
        return {name: CmvnStats.from_dict(stats) for name, stats in self.speakers.items()}

    def build_network(self) -> TrainableNetwork:
        """The network, with the weights that training begins with."""
        network = self.spec.build_model()
        if self.initial is not None and self.initial.url:
            network.load_state_dict(self.initial.read())
        return network

    @property
    def new_parameters(self) -> frozenset[str] | None:
        """Names of the parameters that begin with random values; None if all do."""
        return None if self.initial is None else frozenset(self.initial.new)

    @override
    def _further(self, name: Literal["train", "valid"], index: ShardIndex) -> dict[str, Any]:
        from recognition.data.written_texts import read_written_texts

        limits: dict[str, Any] = {"max_seconds": self.spec.max_seconds, "min_seconds": self.spec.min_seconds}
        if self.texts_url:
            limits["written"] = read_written_texts(ObjectStore(self.texts_url), name, len(index))
        return {"tokenizer": self.spec.build_tokenizer(), "lenient": name == "valid", **limits}


class SpeechTask:
    """What tasks share whose network hears audio, see `training.learner.task.Task`.

    Args:
        config: What is trained.
        seed: The training's seed.

    Attributes:
        tokenizer: The model's tokens.
        frontend: From audio to features.
        augmenter: Makes and applies the random draws of augmentation.
        comparable: Gives hypotheses the form of the transcripts.
    """

    def __init__(self, config: SpeechTaskConfig, seed: int) -> None:
        from recognition.data.augmentation import Augmenter

        spec = config.spec
        self.tokenizer, self._sample_rate = spec.build_tokenizer(), spec.sample_rate
        self._min_seconds = spec.min_seconds
        self.comparable = spec.comparable
        self.frontend = spec.build_frontend(config.speaker_stats())
        self.augmenter = Augmenter(config.augment, spec.sample_rate, seed, spec.states_per_frame)

    def to(self, device: torch.device) -> None:
        """Move the front end."""
        self.frontend.to(device)

    def prepare_draws(self) -> None:
        """Make the noise that augmentation draws from: its Fourier transform rounds differently with fewer threads."""
        from speech.features.augment.noise import generated

        generated("pink", self._sample_rate)

    def drawn(self, batch: Batch, epoch: int) -> Batch:
        """Add the random draws of an epoch's augmentation to a batch."""
        return self.augmenter.drawn(batch, epoch)

    def heard_seconds(self, ids: Sequence[str], seconds: NDArray[np.float64], epoch: int) -> NDArray[np.float64]:
        """Seconds that the network computes for utterances in an epoch: their duration after augmentation, or more."""
        return self.augmenter.heard_seconds(ids, seconds, epoch).clip(min=self._min_seconds)

    def features(self, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Augmented features [batch, frames, dim] of a batch with its draws, and frames [batch] on the host."""
        feats, _ = self.augmenter.features(self.frontend, batch, device)
        return feats, self.augmenter.num_frames(self.frontend, batch)


class FrameOutputs(NamedTuple):
    """What a network puts out for the frames of a batch of utterances, on the CPU."""

    tensors: tuple[Tensor, ...]
    """Each [batch, frames, ...]."""
    frames: Tensor
    """Frames of each utterance [batch]."""
    starts: Tensor
    """Start of each utterance's first frame, in seconds [batch]."""
    pieces: Mapping[int, tuple[Piece, ...]] = {}
    """By number of the utterance: its pieces after the first one, if it was cut."""


class NetworkRecognizer(Recognizer[E]):
    """What recognizers share whose network hears audio.

    Args:
        spec: The bundle's contents without the weights.
        model: The network.
        decode: Decoding parameters.
        device: Device of the network, for example `cpu` or `cuda`.
        speakers: Statistics by speaker, for `cmvn: speaker`.
    """

    def __init__(
        self,
        spec: BundleSpec,
        model: nn.Module,
        decode: DecodeConfig,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> None:
        super().__init__(spec, decode)
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.frontend = spec.build_frontend(dict(speakers or {})).to(self.device)
        self.tokenizer = spec.build_tokenizer()

    @abstractmethod
    def network_outputs(self, feats: Tensor, frames: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """What the network puts out.

        Args:
            feats: Features [batch, frames, F].
            frames: Frames of each utterance [batch].

        Returns:
            Tensors, each [batch, output frames, ...], and the output frames of each utterance [batch].
        """

    def outputs(self, inputs: Tensor, lengths: Tensor, speakers: Sequence[str] | None = None) -> FrameOutputs:
        """What the network puts out, after trimming or padding the silence at utterances' ends to the same length.

        Utterances that are longer than it can read are cut in pauses; arguments as for `encode`.
        """
        most = self.spec.max_inputs(stored=inputs.ndim == 3)
        if most and len(lengths) and int(lengths.max()) > most:
            from recognition.long_utterances import outputs_in_pieces

            return outputs_in_pieces(self.outputs, self.frontend, inputs, lengths, speakers, most)
        with torch.inference_mode():
            feats, num_frames, starts = self.frontend.trimmed(inputs.to(self.device), lengths.to(self.device), speakers)
            tensors, frames = self.network_outputs(rounded_up(feats, frame_multiple(self.device)), num_frames)
            frames = frames.cpu()
            longest = max([1, *frames.tolist()])
            return FrameOutputs(tuple(tensor[:, :longest].cpu() for tensor in tensors), frames, starts.cpu())

    @property
    def frame_seconds(self) -> float:
        """Frame shift of the network's output in seconds."""
        return self.spec.frame_ms / 1000

    def frame_times(self, start: Tensor, begin: float, end: float, pieces: Sequence[Piece] = ()) -> FrameTimes:
        """When the output frames of an utterance are.

        Args:
            start: Start of its first frame, in seconds after `begin`.
            begin: Start of the utterance in its recording, seconds.
            end: Its end.
            pieces: Its pieces after the first one, if it was cut.
        """
        from speech.words import FrameTimes, Piece

        later = tuple(Piece(first, begin + offset, begin + before) for first, offset, before in pieces)
        return FrameTimes(self.frame_seconds, begin + float(start), begin, end, later)
