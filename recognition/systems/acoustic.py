"""What systems share whose encoder is an acoustic model: features of audio in, log posteriors of each frame out.

An objective of `speech.objectives` compares them with the transcripts' tokens or with the tied states of forced
alignments, and a decoder of `speech.decoding` searches them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import TypeAdapter
from typing_extensions import override

from configurable.lazy import torch
from devices.transfers import known_on_host
from recognition.bundle import BundleSpec, load_bundle
from recognition.recognizer import Adapter, Arrays, Elsewhere
from recognition.system import Ability, SystemConfig
from recognition.systems.base import NetworkRecognizer, SpeechTask, SpeechTaskConfig
from speech.decoding import DecodeChoice, DecodeConfig, Decoder, GraphDecoder, build_decoder
from speech.features.cmvn import CmvnStats
from speech.hmm.priors import StateOutputs
from speech.hypotheses import Hypothesis, Word
from speech.models import build_model
from speech.objectives import CtcConfig, ObjectiveChoice, build_objective
from speech.tokens import tokenizer_from_dict
from storage.batching import BatchLimits
from storage.index import ShardIndex
from storage.objects import ObjectStore

if TYPE_CHECKING:
    from torch import Tensor, nn

    from devices.padding import CalledNetwork
    from recognition.adaptation import SpeakerAdapter
    from recognition.data.dataset import Batch, SpeechDataset
    from speech.hmm.ivector import IvectorExtractor
    from speech.hmm.model import HmmModel
    from speech.models.networks.base import AcousticModel, ModelStage, TrainableNetwork
    from speech.words import FrameTimes, Piece


# --- what is trained


class AcousticTaskConfig(SpeechTaskConfig):
    """Which acoustic model is trained, on which data, and with which objective."""

    kind: Literal["acoustic"] = "acoustic"
    objective: ObjectiveChoice = CtcConfig()
    """What is minimized."""
    alignments_url: str = ""
    """Store of the sets' alignments, if the outputs are states: `train.parquet` and `valid.parquet`."""

    def build(self, seed: int) -> AcousticTask:
        """The task at one process."""
        return AcousticTask(self, seed)

    @override
    def _further(self, name: Literal["train", "valid"], index: ShardIndex) -> dict[str, Any]:
        from recognition.data.segments import segments_of
        from recognition.data.state_targets import StateTargets, read_alignments

        targets = None
        if self.spec.system.targets == "states":
            table = read_alignments(ObjectStore(self.alignments_url), name)
            targets = StateTargets(table, self.spec.frame_factor, segments_of(index))
        return super()._further(name, index) | {"targets": targets}


class AcousticTask(SpeechTask):
    """An acoustic model's task at one process, see `training.learner.task.Task`.

    Args:
        config: What is trained.
        seed: The training's seed.

    Attributes:
        objective: What is minimized.
    """

    def __init__(self, config: AcousticTaskConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.objective = build_objective(config.objective)
        self._of_states = config.spec.system.targets == "states"

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
        self,
        network: TrainableNetwork,
        data: SpeechDataset,
        limits: BatchLimits,
        device: torch.device,
        loss_only: bool = False,
    ) -> dict[str, float]:
        """Loss per token or frame and greedy WER of a set; both are NaN if the outputs are not finite.

        The WER is there even if the loss suffices: it costs next to nothing.
        """
        from recognition.validation import validate
        from speech.decoding import DecodeError

        tokenizer = None if self._of_states else self.tokenizer
        try:
            return validate(network, self.frontend, data, tokenizer, self.objective, limits, device)
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


# --- what recognizes


class FrameSystem(SystemConfig):
    """Base class of systems whose encoder puts out log posteriors of frames."""

    task_config: ClassVar[type[SpeechTaskConfig] | None] = AcousticTaskConfig
    abilities: ClassVar[frozenset[Ability]] = frozenset({"word times", "several hypotheses", "tuning"})

    @override
    def build_network(self, spec: BundleSpec) -> AcousticModel:
        return build_model(spec.network, spec.input_width, spec.num_outputs)

    @override
    def open(
        self,
        folder: Path,
        spec: BundleSpec,
        decode: DecodeConfig,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> FrameRecognizer:
        spec, network = load_bundle(folder)
        hmm, extractor = None, None
        if spec.features.adapted:
            from recognition.adaptation import load_extractor, load_hmm

            hmm, extractor = load_hmm(folder, spec), load_extractor(folder, spec)
        return FrameRecognizer(spec, network, decode, device, speakers, hmm, extractor)


class Scores(NamedTuple):
    """Encoder outputs of a batch of utterances, on the CPU."""

    log_probs: Tensor
    """Log posteriors [batch, frames, tokens or states]."""
    frames: Tensor
    """Frames of each utterance [batch]."""
    starts: Tensor
    """Start time of each utterance's first frame within its recording, in seconds [batch]."""
    pieces: Mapping[int, tuple[Piece, ...]] = {}
    """By number of the utterance: its pieces after the first one, if it was cut."""


class FrameRecognizer(NetworkRecognizer[Scores]):
    """An acoustic model, and a decoder that searches its log posteriors.

    Args:
        spec: The bundle's contents without the weights.
        model: The acoustic model.
        decode: Decoding parameters; the bundle's own by default.
        device: Device of the model, for example `cpu` or `cuda`.
        speakers: Statistics by speaker, for `cmvn: speaker`.
        hmm: The GMM-HMM that makes the features, if they are adapted to speakers.
        extractor: Of the i-vectors among the features, if there are any.
    """

    together_s = 3600.0

    def __init__(
        self,
        spec: BundleSpec,
        model: nn.Module,
        decode: DecodeConfig | None = None,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
        hmm: HmmModel | None = None,
        extractor: IvectorExtractor | None = None,
    ) -> None:
        super().__init__(spec, model, decode or spec.decode, device, speakers)
        self._hmm, self._extractor = hmm, extractor

    @override
    def network_outputs(self, feats: Tensor, frames: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        log_probs, out_frames = self.model(feats, frames)
        return (log_probs,), out_frames

    @override
    def encode(
        self,
        inputs: Tensor,
        lengths: Tensor,
        speakers: Sequence[str] | None = None,
        languages: Sequence[str] | None = None,
    ) -> Scores:
        (log_probs,), frames, starts, pieces = self.outputs(inputs, lengths, speakers)
        return Scores(log_probs, frames, starts, pieces)

    @override
    def search(self, encoded: Scores) -> list[Hypothesis]:
        return self.decoder.decode(encoded.log_probs, encoded.frames)

    @override
    def prepare(self) -> None:
        self.decoder.prepare()

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder, built when it is first used: some uses need only the model's output.

        Raises:
            DecodeError: It cannot read the model's outputs.
        """
        self.spec.system.check_decoder(self.cfg.kind)
        return build_decoder(self.cfg, self.tokenizer, self.spec.state_outputs)

    @override
    def with_decoder(self, cfg: DecodeConfig) -> Self:
        other = copy(self)
        other.cfg, other.decoder = cfg, self.decoder.with_config(cfg)
        return other

    @property
    @override
    def adapter(self) -> Adapter | None:
        return self.adapted if self.spec.features.adapted else None

    def adapted(self, waves: Iterable[Tensor]) -> list[Tensor]:
        """An `Adapter`, of models that read features adapted to speakers."""
        return self._adapter(waves)

    @cached_property
    def _adapter(self) -> SpeakerAdapter:
        from recognition.adaptation import SpeakerAdapter

        spec = self.spec
        assert self._hmm is not None
        assert spec.adaptation is not None
        assert isinstance(self.decoder, GraphDecoder), "states are decoded with a graph"
        search = self.decoder.search
        return SpeakerAdapter(self._hmm, spec.adaptation, spec.sample_rate, search, spec.features, self._extractor)

    @override
    def elsewhere(self) -> Elsewhere[Scores] | None:
        if not self.decoder.slow:
            return None
        cfg, states = self.cfg.model_dump(mode="json"), self.spec.state_outputs
        about = {"decode": cfg, "tokenizer": self.tokenizer.to_dict(), "states": states}
        return Elsewhere(search_frames, json.dumps(about), _arrays)

    @override
    def times(self, encoded: Scores, row: int, begin: float = 0.0, end: float = math.inf) -> FrameTimes:
        return self.frame_times(encoded.starts[row], begin, end, encoded.pieces.get(row, ()))

    @override
    def timed_words(self, encoded: Scores, row: int, hypothesis: Hypothesis, times: FrameTimes) -> list[Word]:
        from speech.words import timed_words

        return timed_words(hypothesis, encoded.log_probs[row, : int(encoded.frames[row])], self.tokenizer, times)


def _arrays(encoded: Scores) -> list[Arrays]:
    rows = zip(encoded.log_probs, encoded.frames.tolist(), strict=True)
    return [{"log_probs": log_probs[:count].numpy()} for log_probs, count in rows]


def search_frames(description: str, arrays: Arrays) -> Hypothesis:
    """Search the log posteriors [frames, tokens] of an utterance, in a process that has only a description.

    Args:
        description: Of `FrameRecognizer.elsewhere`.
        arrays: Its log posteriors.
    """
    log_probs = torch.from_numpy(arrays["log_probs"])[None]
    return _decoder(description).decode(log_probs, torch.tensor([log_probs.shape[1]]))[0]


_held: dict[str, Decoder] = {}
"""This process's decoder by its description."""


def _decoder(description: str) -> Decoder:
    """The decoder of a description; it shares what the one before has read, if only parameters differ."""
    if description not in _held:
        torch.set_num_threads(1)
        value = json.loads(description)
        cfg = TypeAdapter(DecodeChoice).validate_python(value["decode"])
        before = next(iter(_held.values()), None)
        if (
            before is not None
            and isinstance(cfg, type(before.cfg))
            and before.tokenizer.to_dict() == value["tokenizer"]
        ):
            made = before.with_config(cfg)
        else:
            states = StateOutputs(tuple(value["states"][0]), value["states"][1]) if value["states"] else None
            made = build_decoder(cfg, tokenizer_from_dict(value["tokenizer"]), states)
        _held.clear()
        _held[description] = made
    return _held[description]
