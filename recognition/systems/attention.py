"""Attention encoder-decoders: an acoustic model, a decoder network that attends to its frames, and CTC beside it.

The decoder network is our own or Whisper's (`speech.models.DECODER_NETWORKS`). Training minimizes the joint loss of
`speech.objectives.attention`, and `speech.decoding.attention` searches.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from pydantic import field_validator, model_validator
from typing_extensions import override

from configurable.lazy import torch
from devices.padding import frame_multiple, rounded_up
from devices.transfers import beside, known_on_host
from recognition.bundle import BundleSpec, load_bundle
from recognition.system import Ability, SystemConfig
from recognition.systems.base import NetworkRecognizer, SpeechTask, SpeechTaskConfig
from speech.decoding import DecodeConfig, DecodeError, Hypothesis
from speech.decoding.attention import AttentionDecodeConfig, AttentionSearch
from speech.features.cmvn import CmvnStats
from speech.models import DecoderNetworkChoice, TransformerDecoderConfig, WhisperDecoderConfig, build_model
from speech.objectives import ObjectiveChoice, ObjectiveConfig
from speech.objectives.attention import AttentionConfig, JointAttention, with_start
from speech.tokens import WhisperTokenizer
from storage.batching import BatchLimits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from devices.padding import CalledNetwork
    from recognition.data.dataset import Batch, SpeechDataset
    from recognition.initial_weights import SourceModel
    from recognition.pretrained import PretrainedModel
    from speech.models.networks.base import TrainableNetwork
    from speech.models.networks.encoder_decoder import EncoderDecoder
    from speech.words import FrameTimes, Piece


# --- what is trained


class AttentionTaskConfig(SpeechTaskConfig):
    """Which attention model is trained, on which data, and with which objective."""

    kind: Literal["attention"] = "attention"
    objective: ObjectiveChoice = AttentionConfig()
    """What is minimized."""

    @field_validator("objective")
    @classmethod
    def _joint(cls, value: ObjectiveConfig) -> ObjectiveConfig:
        assert isinstance(value, AttentionConfig), "the system's objective"
        return value

    def build(self, seed: int) -> AttentionTask:
        """The task at one process."""
        return AttentionTask(self, seed)


class AttentionTask(SpeechTask):
    """An attention model's task at one process, see `training.learner.task.Task`.

    Args:
        config: What is trained.
        seed: The training's seed.

    Attributes:
        objective: What is minimized.
    """

    def __init__(self, config: AttentionTaskConfig, seed: int) -> None:
        super().__init__(config, seed)
        system, objective = config.spec.system, config.objective
        assert isinstance(system, AttentionSystem)
        assert isinstance(objective, AttentionConfig)
        if not system.ctc:
            objective = objective.model_copy(update={"ctc_weight": 0.0})
        self.objective = JointAttention(objective, self.tokenizer.end)

    def losses(self, network: CalledNetwork, batch: Batch, device: torch.device) -> tuple[Tensor, int]:
        """The joint losses of a batch with its draws, and the number of utterances that are too short for CTC."""
        feats, frames = self.augmenter.features(self.frontend, batch, device)
        out_frames = network.num_frames(self.augmenter.num_frames(self.frontend, batch))
        with known_on_host(frames=out_frames):
            outputs, _ = network(feats, frames, self._read(batch, feats))
        return self.objective.losses(outputs, out_frames, batch)

    def _read(self, batch: Batch, feats: Tensor) -> Tensor:
        """What the decoder network reads: transcripts with the tokens that precede them, beside the features."""
        tokenizer = self.tokenizer
        starts = [tokenizer.start_of(language) for language in batch.languages] or [tokenizer.start]
        return beside(with_start(batch.tokens, starts), feats)

    def items(self, batch: Batch) -> int:
        """Tokens of a batch, ends of texts included."""
        return self.objective.items(batch)

    def validate(
        self, network: TrainableNetwork, data: SpeechDataset, limits: BatchLimits, device: torch.device
    ) -> dict[str, float]:
        """Loss per token, share of right tokens, and greedy WER of a set; NaN if the outputs are not finite.

        The greedy search asks the decoder network alone: CTC would hide what it has not learned, as would the rule for
        utterances without speech.
        """
        from recognition.validation import Validation, over_batches
        from speech.models.networks.encoder_decoder import EncoderDecoder

        assert isinstance(network, EncoderDecoder)
        cfg = AttentionDecodeConfig(beam=1, ctc_weight=0.0, no_speech=1.0, times="none")
        search, validation = AttentionSearch(cfg, network.decoder, self.tokenizer), Validation(self.objective, None)

        def add(batch: Batch) -> None:
            inputs, lengths = batch.inputs.to(device), batch.lengths.to(device)
            feats, frames = self.frontend.trimmed(inputs, lengths, batch.speakers)[:2]
            encoded, frames = network.encode(rounded_up(feats, frame_multiple(device)), frames)
            outputs = network.outputs(encoded, frames, self._read(batch, encoded))
            validation.add(batch, outputs, frames, search(encoded, frames))

        try:
            lost = over_batches(data, limits, add)
        except DecodeError:
            return {"loss": math.nan, "wer": math.nan}
        return validation.figures() | lost


# --- what recognizes


class AttentionSystem(SystemConfig):
    """An acoustic model and a decoder network that attends to its frames, trained with `train.objective: attention`."""

    kind: Literal["attention"] = "attention"
    decoder_network: DecoderNetworkChoice = TransformerDecoderConfig()
    """The decoder network."""
    ctc: bool = True
    """Whether the encoder has an output layer for CTC, too, which training and search then use by weight."""

    objectives: ClassVar[tuple[str, ...]] = ("attention",)
    task_config: ClassVar[type[SpeechTaskConfig] | None] = AttentionTaskConfig
    decoders: ClassVar[tuple[str, ...]] = ("attention",)
    abilities: ClassVar[frozenset[Ability]] = frozenset({"word times", "several hypotheses", "tuning"})

    @model_validator(mode="after")
    def _check_ctc(self) -> Self:
        if self.ctc and isinstance(self.decoder_network, WhisperDecoderConfig):
            raise ValueError("Whisper's tokens have no blank, which CTC needs: set recognizer.ctc to false")
        return self

    @override
    def check_objective(self, objective: ObjectiveConfig) -> None:
        super().check_objective(objective)
        assert isinstance(objective, AttentionConfig)
        if self.ctc and not objective.ctc_weight:
            raise ValueError(
                "train.objective.ctc_weight is 0, which leaves CTC's output layer untrained: set recognizer.kind to "
                "attention and recognizer.ctc to false"
            )

    @override
    def of_pretrained(self, model: PretrainedModel) -> Self:
        if not isinstance(self.decoder_network, WhisperDecoderConfig):
            return self
        network = self.decoder_network.described(model.config, model.generation)
        return self.model_copy(update={"decoder_network": network})

    @override
    def pretrained_source(self, model: PretrainedModel, source: SourceModel) -> SourceModel:
        network = self.decoder_network
        if not isinstance(network, WhisperDecoderConfig):
            return source
        from speech.models.networks.whisper_decoder import whisper_decoder_weights, whisper_tokenizer

        size = model.config.get("vocab_size")
        tokenizer = whisper_tokenizer(model.tokenizer or "{}", size, model.generation, **network.asked)

        def weights() -> dict[str, Tensor]:
            own = whisper_decoder_weights(network, tokenizer.size, model.paths)
            return source.weights() | {f"decoder.{name}": tensor for name, tensor in own.items()}

        return replace(source, tokenizer=tokenizer, weights=weights)

    @override
    def of_model(self, source: SourceModel) -> Self:
        own, theirs = self.decoder_network, source.system
        if not isinstance(own, WhisperDecoderConfig) or not isinstance(theirs, AttentionSystem):
            return self
        if not isinstance(theirs.decoder_network, WhisperDecoderConfig):
            return self
        given = {name: getattr(own, name) for name in own.model_fields_set}
        return self.model_copy(update={"decoder_network": theirs.decoder_network.model_copy(update=given)})

    @override
    def as_asked(self, source: SourceModel) -> SourceModel:
        network, known = self.decoder_network, source.tokenizer
        if not isinstance(network, WhisperDecoderConfig) or not isinstance(known, WhisperTokenizer):
            return source
        tokenizer = WhisperTokenizer.from_dict(known.to_dict() | network.asked)
        if tokenizer.to_dict() == known.to_dict():
            return source
        digest = hashlib.sha256(json.dumps([source.digest, network.asked]).encode()).hexdigest()
        return replace(source, tokenizer=tokenizer, digest=digest)

    @override
    def check(self, spec: BundleSpec) -> None:
        super().check(spec)
        if spec.states is not None:
            raise ValueError("a bundle of kind attention has tokens, and this one has states: its system is hybrid")
        if self.ctc and spec.tokenizer and spec.tokenizer.get("kind") == WhisperTokenizer.kind:
            raise ValueError("Whisper's tokens have no blank, which CTC needs: its system's ctc must be false")

    @override
    def build_network(self, spec: BundleSpec) -> EncoderDecoder:
        from speech.models.networks.encoder_decoder import SPARE_OUTPUTS, EncoderDecoder

        tokenizer = spec.build_tokenizer()
        encoder = build_model(spec.network, spec.input_width, tokenizer.size if self.ctc else SPARE_OUTPUTS)
        return EncoderDecoder(encoder, self.decoder_network, tokenizer.size, len(tokenizer.start), self.ctc)

    @override
    def num_layers(self, spec: BundleSpec) -> int:
        return super().num_layers(spec) + self.decoder_network.layers

    @override
    def open(
        self,
        folder: Path,
        spec: BundleSpec,
        decode: DecodeConfig,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> AttentionRecognizer:
        spec, network = load_bundle(folder)
        return AttentionRecognizer(spec, network, decode, device, speakers)


class Attended(NamedTuple):
    """Encoder outputs of a batch of utterances, on the CPU."""

    encoded: Tensor
    """What the decoder network attends to [batch, frames, width]."""
    frames: Tensor
    """Frames of each utterance [batch]."""
    starts: Tensor
    """Start time of each utterance's first frame within its recording, in seconds [batch]."""
    posteriors: Tensor | None
    """Log posteriors by CTC [batch, frames, tokens]; None without CTC."""
    pieces: Mapping[int, tuple[Piece, ...]] = {}
    """By number of the utterance: its pieces after the first one, if it was cut."""


class AttentionRecognizer(NetworkRecognizer[Attended]):
    """An encoder, and a search with a decoder network.

    Args:
        spec: The bundle's contents without the weights.
        model: The network.
        decode: Decoding parameters.
        device: Device of the network, for example `cpu` or `cuda`.
        speakers: Statistics by speaker, for `cmvn: speaker`.
    """

    model: EncoderDecoder

    def __init__(
        self,
        spec: BundleSpec,
        model: nn.Module,
        decode: DecodeConfig,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> None:
        from speech.models.networks.encoder_decoder import EncoderDecoder

        assert isinstance(model, EncoderDecoder)
        super().__init__(spec, model, decode, device, speakers)

    @override
    def network_outputs(self, feats: Tensor, frames: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        encoded, out_frames = self.model.encode(feats, frames)
        posteriors = self.model.posteriors(encoded)
        return (encoded.float(), *(() if posteriors is None else (posteriors,))), out_frames

    @override
    def encode(self, inputs: Tensor, lengths: Tensor, speakers: Sequence[str] | None = None) -> Attended:
        (encoded, *posteriors), frames, starts, pieces = self.outputs(inputs, lengths, speakers)
        return Attended(encoded, frames, starts, posteriors[0] if posteriors else None, pieces)

    @override
    def search(self, encoded: Attended) -> list[Hypothesis]:
        if not encoded.pieces:
            return self._search(encoded.encoded.to(self.device), encoded.frames, encoded.posteriors)
        from recognition.long_utterances import joined_hypothesis

        assert isinstance(self.cfg, AttentionDecodeConfig)
        places = [[0, *(piece.first for piece in encoded.pieces.get(row, ()))] for row in range(len(encoded.frames))]
        spans = [
            (row, *span)
            for row, count in enumerate(encoded.frames.tolist())
            for span in pairwise([*places[row], count])
        ]
        found = iter(self._search_spans(encoded, spans))
        parts = [list(islice(found, len(firsts))) for firsts in places]
        return [
            some[0] if len(some) == 1 else joined_hypothesis(some, firsts, self.cfg.nbest)
            for some, firsts in zip(parts, places, strict=True)
        ]

    def _search_spans(self, encoded: Attended, spans: Sequence[tuple[int, int, int]]) -> Iterator[Hypothesis]:
        """The hypothesis of each of some spans: number of the utterance, first frame, and the one after the last."""
        from recognition.long_utterances import PIECES

        for first in range(0, len(spans), PIECES):
            some = spans[first : first + PIECES]
            tensors = [
                torch.nn.utils.rnn.pad_sequence([tensor[row, begin:end] for row, begin, end in some], batch_first=True)
                for tensor in (encoded.encoded, encoded.posteriors)
                if tensor is not None
            ]
            counts = torch.tensor([end - begin for _, begin, end in some])
            yield from self._search(tensors[0].to(self.device), counts, *tensors[1:])

    @override
    def prepare(self) -> None:
        self._search.prepare()

    @cached_property
    def _search(self) -> AttentionSearch:
        self.spec.system.check_decoder(self.cfg.kind)
        assert isinstance(self.cfg, AttentionDecodeConfig)
        return AttentionSearch(self.cfg, self.model.decoder, self.tokenizer)

    @override
    def with_decoder(self, cfg: DecodeConfig) -> Self:
        assert isinstance(cfg, AttentionDecodeConfig)
        other = copy(self)
        other.cfg, other._search = cfg, self._search.with_config(cfg)
        return other

    @override
    def times(self, encoded: Attended, row: int, begin: float = 0.0, end: float = math.inf) -> FrameTimes | None:
        assert isinstance(self.cfg, AttentionDecodeConfig)
        if self.cfg.times == "none":
            return None
        return self.frame_times(encoded.starts[row], begin, end, encoded.pieces.get(row, ()))
