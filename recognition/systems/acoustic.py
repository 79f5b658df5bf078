"""Acoustic models as a task: features of audio in, log probabilities of each frame out, an objective compares them.

The objective says what the outputs are: tokens by CTC, or tied states of forced alignments for hybrid recognizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from devices.transfers import known_on_host
from recognition.bundle import BundleSpec
from recognition.initial_weights import InitialWeights
from recognition.systems.base import SystemTaskConfig
from speech.features.augment import AugmentConfig
from speech.features.cmvn import CmvnStats
from speech.objectives import CtcConfig, ObjectiveChoice, build_objective
from storage.batching import BatchLimits
from storage.index import ShardIndex
from storage.objects import ObjectStore

if TYPE_CHECKING:
    from torch import Tensor, nn

    from devices.padding import CalledNetwork
    from recognition.data.dataset import Batch, SpeechDataset
    from speech.models.networks.base import AcousticModel, ModelStage, TrainableNetwork


class AcousticTaskConfig(SystemTaskConfig):
    """Which acoustic model is trained, and on which data."""

    kind: Literal["acoustic"] = "acoustic"
    spec: BundleSpec
    """The contents of the finished bundle: features, tokens, model sizes, normalization."""
    objective: ObjectiveChoice = CtcConfig()
    """What is minimized."""
    augment: AugmentConfig = AugmentConfig()
    """Augmentation of training audio and features."""
    speakers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Feature statistics by speaker, for `cmvn: speaker`."""
    alignments_url: str = ""
    """Store of the sets' alignments, if the objective needs them: `train.parquet` and `valid.parquet`."""

    initial: InitialWeights | None = None
    """The weights that training begins with; random ones without."""

    def speaker_stats(self) -> dict[str, CmvnStats]:
        """The speakers' statistics as objects."""
        return {name: CmvnStats.from_dict(stats) for name, stats in self.speakers.items()}

    def build_network(self) -> AcousticModel:
        """The model, with the weights that training begins with."""
        network = self.spec.build_model()
        if self.initial is not None and self.initial.url:
            network.load_state_dict(self.initial.read())
        return network

    @property
    def new_parameters(self) -> frozenset[str] | None:
        """Names of the parameters that begin with random values; None if all do."""
        return None if self.initial is None else frozenset(self.initial.new)

    def build(self, seed: int) -> AcousticTask:
        """The task at one process."""
        return AcousticTask(self, seed)

    @override
    def _further(self, name: Literal["train", "valid"], index: ShardIndex) -> dict[str, Any]:
        from recognition.data.segments import segments_of
        from recognition.data.state_targets import StateTargets, read_alignments

        targets = None
        if self.objective.needs == "states":
            table = read_alignments(ObjectStore(self.alignments_url), name)
            targets = StateTargets(table, self.spec.frame_factor, segments_of(index))
        limits = {"lenient": name == "valid", "max_seconds": self.spec.max_seconds}
        return {"tokenizer": self.spec.build_tokenizer(), "targets": targets, **limits}


class AcousticTask:
    """An acoustic model's task at one process, see `training.learner.task.Task`.

    Args:
        config: What is trained.
        seed: The training's seed.

    Attributes:
        frontend: From audio to features.
        objective: What is minimized.
        augmenter: Makes and applies the random draws of augmentation.
    """

    def __init__(self, config: AcousticTaskConfig, seed: int) -> None:
        from recognition.data.augmentation import Augmenter

        spec = config.spec
        self._tokenizer, self._sample_rate = spec.build_tokenizer(), spec.sample_rate
        self.frontend = spec.build_frontend(config.speaker_stats())
        self.objective = build_objective(config.objective)
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
        """Duration of utterances in an epoch, after augmentation."""
        return self.augmenter.heard_seconds(ids, seconds, epoch)

    def losses(self, network: CalledNetwork, batch: Batch, device: torch.device) -> tuple[Tensor, int]:
        """The objective's losses of a batch with its draws, and the number of unalignable utterances."""
        feats, frames = self.augmenter.features(self.frontend, batch, device)
        out_frames = network.num_frames(self.augmenter.num_frames(self.frontend, batch))
        with known_on_host(frames=out_frames):
            log_probs, _ = network(feats, frames)
        return self.objective.losses(log_probs, out_frames, batch)

    def items(self, batch: Batch) -> int:
        """Tokens of a batch, or frames with a state."""
        return self.objective.items(batch)

    def validate(
        self, network: TrainableNetwork, data: SpeechDataset, limits: BatchLimits, device: torch.device
    ) -> dict[str, float]:
        """Loss per token or frame and greedy WER of a set; both are NaN if the outputs are not finite."""
        from recognition.validation import validate
        from speech.decoding import DecodeError

        try:
            return validate(network, self.frontend, data, self._tokenizer, self.objective, limits, device)
        except DecodeError:
            return {"loss": math.nan, "wer": math.nan}

    # --- over several ranks

    def split(self, network: nn.Module, stages: int) -> list[ModelStage]:
        """The model's layers as consecutive stages.

        Raises:
            ValueError: If it has too few of them, or cannot be split.
        """
        from speech.models.networks.base import AcousticModel
        from speech.models.networks.stages import split_model

        assert isinstance(network, AcousticModel)
        return split_model(network, stages)

    def features(self, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Augmented features [batch, frames, dim] of a batch with its draws, and frames [batch] on the host."""
        feats, _ = self.augmenter.features(self.frontend, batch, device)
        return feats, self.augmenter.num_frames(self.frontend, batch)

    def targets(self, batch: Batch) -> dict[str, Tensor]:
        """The transcripts' tokens [batch, most tokens] and their numbers [batch]."""
        return {"tokens": batch.tokens, "token_lengths": batch.token_lengths}

    def stage_losses(self, outputs: Tensor, frames: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, int]:
        """The objective's losses from the last stage's outputs."""
        return self.objective.losses(outputs, frames, Transcripts(**targets))

    def stage_items(self, targets: dict[str, Tensor]) -> int:
        """Number of tokens."""
        return self.objective.items(Transcripts(**targets))


@dataclass
class Transcripts:
    """Transcripts as an objective reads them."""

    tokens: Tensor
    """Token numbers [batch, most tokens]."""
    token_lengths: Tensor
    """Tokens of each utterance [batch]."""
