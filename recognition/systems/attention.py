"""Attention encoder-decoders: an acoustic model, a decoder network that attends to its frames, and CTC beside it.

The decoder network is our own or Whisper's (`speech.models.DECODER_NETWORKS`). Training minimizes the joint loss of
`speech.objectives.attention`, and `speech.decoding.attention` searches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import field_validator, model_validator
from typing_extensions import override

from recognition.bundle import BundleSpec
from recognition.systems.base import SpeechTaskConfig
from recognition.systems.token_networks import TokenRecognizer, TokenSystem, TokenTask
from speech.decoding import DecodeConfig
from speech.decoding.attention import AttentionDecodeConfig, AttentionSearch
from speech.models import DecoderNetworkChoice, TransformerDecoderConfig, WhisperDecoderConfig, build_model
from speech.objectives import ObjectiveChoice, ObjectiveConfig
from speech.objectives.attention import AttentionConfig, JointAttention
from speech.tokens import WhisperTokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from recognition.initial_weights import SourceModel
    from recognition.onnx_graphs import Chunks, Graph, HeardFeatures
    from recognition.pretrained import PretrainedModel
    from speech.models.networks.base import TrainableNetwork
    from speech.models.networks.encoder_decoder import EncoderDecoder, EncoderWithCtc


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


class AttentionTask(TokenTask):
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
        self.objective = JointAttention(objective, self.tokenizer.end, self.tokenizer.languages)

    @override
    def _greedy(self, network: EncoderWithCtc) -> AttentionSearch:
        from speech.models.networks.encoder_decoder import EncoderDecoder

        assert isinstance(network, EncoderDecoder)
        cfg = AttentionDecodeConfig(beam=1, ctc_weight=0.0, no_speech=1.0, times="none")
        return AttentionSearch(cfg, network.decoder, self.tokenizer)


# --- what recognizes


class AttentionSystem(TokenSystem):
    """An acoustic model and a decoder network that attends to its frames, trained with `train.objective: attention`."""

    kind: Literal["attention"] = "attention"
    decoder_network: DecoderNetworkChoice = TransformerDecoderConfig()
    """The decoder network."""
    ctc: bool = True
    """Whether the encoder has an output layer for CTC, too, which training and search then use by weight."""

    objectives: ClassVar[tuple[str, ...]] = ("attention",)
    task_config: ClassVar[type[SpeechTaskConfig] | None] = AttentionTaskConfig
    decoders: ClassVar[tuple[str, ...]] = ("attention",)

    @property
    @override
    def writes(self) -> bool:
        return isinstance(self.decoder_network, WhisperDecoderConfig)

    @property
    @override
    def tells_languages(self) -> bool:
        return self.decoder_network.tells_languages

    @model_validator(mode="after")
    def _check_ctc(self) -> Self:
        if self.ctc and isinstance(self.decoder_network, WhisperDecoderConfig):
            raise ValueError("Whisper's tokens have no blank, which CTC needs: set recognizer.ctc to false")
        return self

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
        if self.ctc and spec.tokenizer and spec.tokenizer.get("kind") == WhisperTokenizer.kind:
            raise ValueError("Whisper's tokens have no blank, which CTC needs: its system's ctc must be false")

    @override
    def build_network(self, spec: BundleSpec) -> EncoderDecoder:
        from speech.models.networks.encoder_decoder import SPARE_OUTPUTS, EncoderDecoder

        tokenizer = spec.build_tokenizer()
        encoder = build_model(spec.network, spec.input_width, tokenizer.size if self.ctc else SPARE_OUTPUTS)
        opening = tokenizer.opening if tokenizer.languages else None
        return EncoderDecoder(encoder, self.decoder_network, tokenizer.size, len(tokenizer.start), self.ctc, opening)

    @override
    def num_layers(self, spec: BundleSpec) -> int:
        return super().num_layers(spec) + self.decoder_network.layers

    @override
    def graphs(
        self, spec: BundleSpec, network: TrainableNetwork, heard: HeardFeatures, chunks: Chunks | None = None
    ) -> list[Graph]:
        from recognition.onnx_graphs import attention_graphs
        from speech.models.networks.encoder_decoder import EncoderDecoder

        assert isinstance(network, EncoderDecoder)
        assert chunks is None, "whole utterances are searched"
        if spec.build_tokenizer().languages:
            raise ValueError(
                "a model that is told the language of speech, or finds it, cannot be exported: only Starling's decoder "
                "does that. Use it with `starling transcribe` or `starling serve`, or train one with "
                "recognizer.decoder_network.language other than auto"
            )
        return attention_graphs(heard, network)

    @property
    @override
    def _recognizer(self) -> type[TokenRecognizer]:
        return AttentionRecognizer


class AttentionRecognizer(TokenRecognizer):
    """An encoder, and a search with a decoder network."""

    model: EncoderDecoder

    @property
    @override
    def languages(self) -> Collection[str]:
        return self.tokenizer.languages

    @override
    def _make_search(self, cfg: DecodeConfig) -> AttentionSearch:
        assert isinstance(cfg, AttentionDecodeConfig)
        return AttentionSearch(cfg, self.model.decoder, self.tokenizer)
