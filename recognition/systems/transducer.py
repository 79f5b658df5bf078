"""Transducers (Graves 2012): an acoustic model, a predictor of tokens, a joiner of both, and CTC if it is asked for.

Training minimizes the loss of `speech.objectives.transducer`, and `speech.decoding.transducer` searches.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator
from typing_extensions import override

from recognition.bundle import BundleSpec
from recognition.systems.base import SpeechTaskConfig
from recognition.systems.token_networks import TokenRecognizer, TokenSystem, TokenTask
from speech.decoding import DecodeConfig
from speech.decoding.transducer import TransducerDecodeConfig, TransducerSearch, TransducerStream
from speech.models import PredictorChoice, StatelessPredictorConfig, build_model
from speech.objectives import ObjectiveChoice, ObjectiveConfig
from speech.objectives.transducer import JointTransducer, TransducerConfig
from speech.tokens import WhisperTokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from recognition.onnx_graphs import Chunks, Graph, HeardFeatures
    from speech.models.networks.base import TrainableNetwork
    from speech.models.networks.encoder_decoder import EncoderWithCtc
    from speech.models.networks.transducer import Transducer


# --- what is trained

_SIMPLE = frozenset({"simple.encoder.weight", "simple.encoder.bias", "simple.predictor.weight"})
"""Weights that only a pruned training has."""


class TransducerTaskConfig(SpeechTaskConfig):
    """Which transducer is trained, on which data, and with which objective."""

    kind: Literal["transducer"] = "transducer"
    objective: ObjectiveChoice = TransducerConfig()
    """What is minimized."""

    @field_validator("objective")
    @classmethod
    def _own(cls, value: ObjectiveConfig) -> ObjectiveConfig:
        assert isinstance(value, TransducerConfig), "the system's objective"
        return value

    def build(self, seed: int) -> TransducerTask:
        """The task at one process."""
        return TransducerTask(self, seed)

    @override
    def build_network(self) -> Transducer:
        from speech.models.networks.transducer import Transducer

        network, objective = super().build_network(), self.objective
        assert isinstance(network, Transducer)
        assert isinstance(objective, TransducerConfig)
        network.joint_bytes = objective.joint_mb << 20
        if objective.prune_range:
            network.prune(objective.prune_range)
        return network

    @property
    @override
    def new_parameters(self) -> frozenset[str] | None:
        new = super().new_parameters
        if new is None:
            return None
        assert isinstance(self.objective, TransducerConfig)
        return new | _SIMPLE if self.objective.prune_range else new

    @override
    def save(self, folder: Path, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
        super().save(folder, {name: tensor for name, tensor in weights.items() if name not in _SIMPLE}, about)


class TransducerTask(TokenTask):
    """A transducer's task at one process, see `training.learner.task.Task`.

    Args:
        config: What is trained.
        seed: The training's seed.

    Attributes:
        objective: What is minimized.
    """

    objective: JointTransducer

    def __init__(self, config: TransducerTaskConfig, seed: int) -> None:
        super().__init__(config, seed)
        assert isinstance(config.objective, TransducerConfig)
        self.objective = JointTransducer(config.objective)

    @property
    @override
    def _validated(self) -> JointTransducer:
        # over all alignments, so that losses with and without pruning can be compared
        return JointTransducer(self.objective.cfg.model_copy(update={"prune_range": 0}))

    @override
    def _greedy(self, network: EncoderWithCtc) -> TransducerSearch:
        from speech.models.networks.transducer import Transducer

        assert isinstance(network, Transducer)
        return TransducerSearch(TransducerDecodeConfig(beam=1, times="none"), network, self.tokenizer)


# --- what recognizes


class TransducerSystem(TokenSystem):
    """An acoustic model, a predictor and a joiner, trained with `train.objective: transducer`."""

    kind: Literal["transducer"] = "transducer"
    predictor: PredictorChoice = StatelessPredictorConfig()
    """What is known of the tokens so far."""
    joint_dim: int = Field(default=256, ge=1)
    """Width of the joiner, which adds what the encoder and the predictor say."""
    ctc: bool = False
    """Whether the encoder has an output layer for CTC, too, which training then uses by weight."""

    objectives: ClassVar[tuple[str, ...]] = ("transducer",)
    task_config: ClassVar[type[SpeechTaskConfig] | None] = TransducerTaskConfig
    decoders: ClassVar[tuple[str, ...]] = ("transducer",)

    @override
    def check(self, spec: BundleSpec) -> None:
        super().check(spec)
        if spec.tokenizer and spec.tokenizer.get("kind") == WhisperTokenizer.kind:
            raise ValueError("Whisper's tokens have no blank, which a transducer needs: its tokens must be others")

    @override
    def build_network(self, spec: BundleSpec) -> Transducer:
        from speech.models.networks.encoder_decoder import SPARE_OUTPUTS
        from speech.models.networks.transducer import Transducer

        vocab = spec.build_tokenizer().size
        encoder = build_model(spec.network, spec.input_width, vocab if self.ctc else SPARE_OUTPUTS)
        return Transducer(encoder, self.predictor, self.joint_dim, vocab, self.ctc)

    @override
    def num_layers(self, spec: BundleSpec) -> int:
        return super().num_layers(spec) + self.predictor.depth

    @override
    def graphs(
        self, spec: BundleSpec, network: TrainableNetwork, heard: HeardFeatures, chunks: Chunks | None = None
    ) -> list[Graph]:
        from recognition.onnx_graphs import transducer_graphs
        from speech.models.networks.transducer import Transducer

        assert isinstance(network, Transducer)
        return transducer_graphs(heard, network, chunks)

    @property
    @override
    def _recognizer(self) -> type[TokenRecognizer]:
        return TransducerRecognizer


class TransducerRecognizer(TokenRecognizer):
    """An encoder, and a search with a predictor and a joiner."""

    model: Transducer

    def stream(self) -> TransducerStream:
        """Begin the search in an utterance whose frames come one after another."""
        assert isinstance(self._search, TransducerSearch)
        return self._search.stream()

    @override
    def _make_search(self, cfg: DecodeConfig) -> TransducerSearch:
        assert isinstance(cfg, TransducerDecodeConfig)
        return TransducerSearch(cfg, self.model, self.tokenizer)
