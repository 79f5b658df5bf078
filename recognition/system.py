"""What a system is: what the engine trains, what a bundle of it holds, and what recognizes with it.

The kinds are in `recognition/systems/`. A bundle names its system, so this module knows neither of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from configurable.choices import Choice
from speech.hypotheses import DecodeError

if TYPE_CHECKING:
    import torch

    from recognition.bundle import BundleSpec
    from recognition.initial_weights import SourceModel
    from recognition.onnx_graphs import Chunks, Graph, HeardFeatures
    from recognition.pretrained import PretrainedModel
    from recognition.recognizer import Recognizer
    from recognition.systems.base import SpeechTaskConfig
    from speech.decoding import DecodeConfig
    from speech.features import FeatureConfig
    from speech.features.cmvn import CmvnStats
    from speech.hmm.config import AlignConfig
    from speech.lm import LmConfig
    from speech.models import ModelConfig
    from speech.models.networks.base import TrainableNetwork
    from speech.objectives import ObjectiveConfig

Ability = Literal["word times", "several hypotheses", "tuning", "forced alignment"]
"""What some recognizers can do besides finding the best hypothesis."""
_REMEDIES: dict[Ability, str] = {
    "word times": "leave out the words' times",
    "several hypotheses": "ask for one",
    "tuning": "remove the section tune, or the fields of decode from search.space",
    "forced alignment": "give a CTC model, or the output of the stage align",
}


class SystemConfig(Choice, ABC):
    """A system; its fields are what it has beside the model, the features and the tokens.

    Attributes:
        objectives: Kinds of `train.objective` that it is trained with; none if its task has a loss of its own.
        targets: What a training compares the outputs with: `tokens` of the transcripts, or `states` of alignments.
        task_config: Configuration of the task that the engine trains; None if it is not trained by the engine.
        decoders: Kinds of decoders that search what its encoder gives.
        abilities: What its recognizers can do besides finding the best hypothesis.
        can_be_split: Whether a training can split its network over learners, which the strategy `pipeline` does.
        files: Files that each of its bundles has beside `bundle.json`.
    """

    objectives: ClassVar[tuple[str, ...]] = ()
    targets: ClassVar[Literal["tokens", "states"]] = "tokens"
    task_config: ClassVar[type[SpeechTaskConfig] | None] = None
    decoders: ClassVar[tuple[str, ...]]
    abilities: ClassVar[frozenset[Ability]] = frozenset()
    can_be_split: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]] = ("model.safetensors",)

    # --- of a configuration

    @property
    def is_trained(self) -> bool:
        """Whether the engine trains it."""
        return self.task_config is not None

    @property
    def writes(self) -> bool:
        """Whether it writes as people do, with capitals, punctuation and digits."""
        return False

    @property
    def tells_languages(self) -> bool:
        """Whether a token of each utterance's language precedes its text, and is predicted unless it is given."""
        return False

    def lacking(self, model: ModelConfig, align: AlignConfig | None, lm: LmConfig | None) -> str:
        """What the system needs of a pipeline that has it not, with the remedy; empty if nothing is missing.

        Args:
            model: The model that it trains.
            align: The GMM-HMM that a pipeline trains, if it does.
            lm: The language model that it estimates, if it does.
        """
        return ""

    def check_objective(self, objective: ObjectiveConfig) -> None:
        """See that the system is trained with an objective.

        Raises:
            ValueError: It is not; the message names the field and the remedy.
        """
        if self.objectives and objective.kind not in self.objectives:
            raise ValueError(
                f"recognizer is {self.kind}, which is not trained with {objective.kind}: set train.objective to "
                f"{' or '.join(self.objectives)}"
            )

    def decoder(self, decode: DecodeConfig, align: AlignConfig | None) -> DecodeConfig:
        """What a pipeline decodes with.

        Args:
            decode: Its section `decode`.
            align: Its section `align`, if there is one.
        """
        return decode

    def check_decoder(self, kind: str) -> None:
        """See that a kind of decoder searches what the encoder gives.

        Raises:
            DecodeError: It does not.
        """
        if kind not in self.decoders:
            raise DecodeError(
                f"decode.kind {kind} does not search what a recognizer of kind {self.kind} puts out: use "
                f"{' or '.join(self.decoders)}"
            )

    def require(self, ability: Ability) -> None:
        """See that recognizers have an ability.

        Raises:
            DecodeError: They have it not.
        """
        if ability not in self.abilities:
            raise DecodeError(f"a recognizer of kind {self.kind} has no {ability}: {_REMEDIES[ability]}")

    def by_speaker(self, features: FeatureConfig) -> bool:
        """Whether all utterances of a speaker are recognized together.

        Args:
            features: What the encoder reads.
        """
        return features.adapted

    def of_pretrained(self, model: PretrainedModel) -> Self:
        """This configuration with what it takes from the pretrained model that training begins with; by default, this.

        Raises:
            ValueError: The model does not fit.
        """
        return self

    def pretrained_source(self, model: PretrainedModel, source: SourceModel) -> SourceModel:
        """What a training takes from a pretrained model: by default its encoder.

        Args:
            model: The pretrained model.
            source: Its encoder.

        Raises:
            ValueError: The model does not fit.
        """
        return source

    def of_model(self, source: SourceModel) -> Self:
        """This configuration with what it takes from the model that training begins with; by default, this."""
        return self

    def as_asked(self, source: SourceModel) -> SourceModel:
        """A model that a training begins with, with what this configuration asks for instead; by default, itself."""
        return source

    # --- of a bundle

    def check(self, spec: BundleSpec) -> None:
        """See that a bundle's description has what the system needs.

        Raises:
            ValueError: It has not.
        """
        missing = [name for name in ("model", "tokenizer") if getattr(spec, name) is None]
        if missing:
            raise ValueError(f"a bundle of kind {self.kind} needs {' and '.join(missing)}")

    def build_network(self, spec: BundleSpec) -> TrainableNetwork:
        """The network, with random weights.

        It must work on torch's device `meta`, too, see `speech.models.config.ModelConfig.build`.

        Raises:
            ValueError: There is none.
        """
        raise ValueError(f"a recognizer of kind {self.kind} has no network: give the model of another kind")

    def graphs(
        self, spec: BundleSpec, network: TrainableNetwork, heard: HeardFeatures, chunks: Chunks | None = None
    ) -> list[Graph]:
        """The parts of the network that `recognition.export` writes as ONNX files.

        Args:
            spec: The bundle's description.
            network: Its network.
            heard: From the features of a file to those that the network reads.
            chunks: How the network reads streams; None: it reads whole utterances.

        Raises:
            ValueError: It has no form that others can recognize with.
        """
        raise ValueError(
            f"a recognizer of kind {self.kind} cannot be exported: only Starling's decoder turns what it puts out into "
            "words. Use it with `starling transcribe` or MLflow, or export a model of kind ctc, transducer or attention"
        )

    def num_layers(self, spec: BundleSpec) -> int:
        """How many layers the network makes, each of which has weights."""
        return spec.network.layers

    @abstractmethod
    def open(
        self,
        folder: Path,
        spec: BundleSpec,
        decode: DecodeConfig,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> Recognizer[Any]:
        """Load a bundle, see `recognition.recognizer.Recognizer.load`."""
