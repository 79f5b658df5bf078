"""What systems share whose network reads an encoder's frames together with tokens: attention models and transducers.

Training gives the network the tokens of the transcripts, and a search asks it for one token after another. The encoder
may have CTC beside it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from typing_extensions import override

from configurable.lazy import torch
from devices.padding import frame_multiple, rounded_up
from devices.transfers import beside, known_on_host
from recognition.bundle import BundleSpec, load_bundle
from recognition.system import Ability, SystemConfig
from recognition.systems.base import NetworkRecognizer, SpeechTask
from speech.decoding import DecodeConfig, DecodeError, Hypothesis
from speech.decoding.token_search import TokenSearch, TokenSearchConfig
from speech.features.cmvn import CmvnStats
from speech.objectives import Objective, ObjectiveConfig
from speech.objectives.attention import with_start
from speech.objectives.base import CtcShareConfig
from storage.batching import BatchLimits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from devices.padding import CalledNetwork
    from recognition.data.dataset import Batch, SpeechDataset
    from speech.models.networks.base import TrainableNetwork
    from speech.models.networks.encoder_decoder import EncoderWithCtc
    from speech.words import FrameTimes, Piece


# --- what is trained


class TokenTask(SpeechTask, ABC):
    """A task at one process whose network reads tokens beside features, see `training.learner.task.Task`.

    Attributes:
        objective: What is minimized.
    """

    objective: Objective

    def losses(self, network: CalledNetwork, batch: Batch, device: torch.device) -> tuple[Tensor, int]:
        """The losses of a batch with its draws, and the number of utterances whose outputs cannot stand for them."""
        feats, frames = self.augmenter.features(self.frontend, batch, device)
        out_frames = network.num_frames(self.augmenter.num_frames(self.frontend, batch))
        with known_on_host(frames=out_frames, token_lengths=batch.token_lengths):
            outputs, _ = network(feats, frames, self._read(batch, feats))
        return self.objective.losses(outputs, out_frames, batch)

    def _read(self, batch: Batch, feats: Tensor) -> Tensor:
        """The tokens that the network reads: transcripts with those that precede them, beside the features."""
        tokenizer = self.tokenizer
        starts = [tokenizer.start_of(language) for language in batch.languages] or [tokenizer.start]
        return beside(with_start(batch.tokens, starts), feats)

    def items(self, batch: Batch) -> int:
        """Tokens of a batch."""
        return self.objective.items(batch)

    @abstractmethod
    def _greedy(self, network: EncoderWithCtc) -> TokenSearch:
        """The search whose error rate is followed: greedy, without what would hide what is not learned, such as CTC."""

    @property
    def _validated(self) -> Objective:
        """The objective that a validation shows."""
        return self.objective

    def validate(
        self,
        network: TrainableNetwork,
        data: SpeechDataset,
        limits: BatchLimits,
        device: torch.device,
        loss_only: bool = False,
    ) -> dict[str, float]:
        """Loss per token and greedy WER of a set, and the objective's figures; NaN if the outputs are not finite.

        Without the WER if the loss suffices: the search takes many times as long.
        """
        from recognition.validation import Validation, over_batches
        from speech.models.networks.encoder_decoder import EncoderWithCtc

        assert isinstance(network, EncoderWithCtc)
        search, validation = self._greedy(network), Validation(self._validated, None, self.comparable)

        def add(batch: Batch) -> None:
            inputs, lengths = batch.inputs.to(device), batch.lengths.to(device)
            feats, frames = self.frontend.trimmed(inputs, lengths, batch.speakers)[:2]
            encoded, frames = network.encode(rounded_up(feats, frame_multiple(device)), frames)
            outputs = network.outputs(encoded, frames, self._read(batch, encoded))
            validation.add(batch, outputs, frames, () if loss_only else search(encoded, frames))

        try:
            lost = over_batches(data, limits, add)
        except DecodeError:
            return {"loss": math.nan, "wer": math.nan}
        return validation.figures() | lost


# --- what recognizes


class TokenSystem(SystemConfig, ABC):
    """Base class of systems whose network reads tokens beside an encoder's frames."""

    ctc: bool
    """Whether the encoder has an output layer for CTC, too."""

    abilities: ClassVar[frozenset[Ability]] = frozenset({"word times", "several hypotheses", "tuning"})

    @override
    def check_objective(self, objective: ObjectiveConfig) -> None:
        super().check_objective(objective)
        assert isinstance(objective, CtcShareConfig)
        if self.ctc and not objective.ctc_weight:
            raise ValueError(
                "train.objective.ctc_weight is 0, which leaves CTC's output layer untrained: set recognizer.kind to "
                f"{self.kind} and recognizer.ctc to false"
            )

    @override
    def check(self, spec: BundleSpec) -> None:
        super().check(spec)
        if spec.states is not None:
            raise ValueError(f"a bundle of kind {self.kind} has tokens, and this one has states: its system is hybrid")

    @override
    def open(
        self,
        folder: Path,
        spec: BundleSpec,
        decode: DecodeConfig,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> TokenRecognizer:
        spec, network = load_bundle(folder)
        return self._recognizer(spec, network, decode, device, speakers)

    @property
    @abstractmethod
    def _recognizer(self) -> type[TokenRecognizer]:
        """The recognizer."""


class EncodedFrames(NamedTuple):
    """Encoder outputs of a batch of utterances, on the CPU."""

    encoded: Tensor
    """What the search reads [batch, frames, width]."""
    frames: Tensor
    """Frames of each utterance [batch]."""
    starts: Tensor
    """Start time of each utterance's first frame within its recording, in seconds [batch]."""
    posteriors: Tensor | None
    """Log posteriors by CTC [batch, frames, tokens]; None without CTC."""
    pieces: Mapping[int, tuple[Piece, ...]] = {}
    """By number of the utterance: its pieces after the first one, if it was cut."""
    languages: Sequence[str] | None = None
    """Language of each utterance that is given; empty for one that is to be found. None: none is given."""


class TokenRecognizer(NetworkRecognizer[EncodedFrames], ABC):
    """An encoder, and a search that asks for one token after another.

    Args:
        spec: The bundle's contents without the weights.
        model: The network.
        decode: Decoding parameters.
        device: Device of the network, for example `cpu` or `cuda`.
        speakers: Statistics by speaker, for `cmvn: speaker`.
    """

    model: EncoderWithCtc

    def __init__(
        self,
        spec: BundleSpec,
        model: nn.Module,
        decode: DecodeConfig,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> None:
        from speech.models.networks.encoder_decoder import EncoderWithCtc

        assert isinstance(model, EncoderWithCtc)
        super().__init__(spec, model, decode, device, speakers)

    @abstractmethod
    def _make_search(self, cfg: DecodeConfig) -> TokenSearch:
        """The search."""

    @override
    def network_outputs(self, feats: Tensor, frames: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        encoded, out_frames = self.model.encode(feats, frames)
        posteriors = self.model.posteriors(encoded)
        return (encoded.float(), *(() if posteriors is None else (posteriors,))), out_frames

    @override
    def encode(
        self,
        inputs: Tensor,
        lengths: Tensor,
        speakers: Sequence[str] | None = None,
        languages: Sequence[str] | None = None,
    ) -> EncodedFrames:
        (encoded, *posteriors), frames, starts, pieces = self.outputs(inputs, lengths, speakers)
        return EncodedFrames(encoded, frames, starts, posteriors[0] if posteriors else None, pieces, languages)

    @override
    def search(self, encoded: EncodedFrames) -> list[Hypothesis]:
        if not encoded.pieces:
            return self._search(encoded.encoded.to(self.device), encoded.frames, encoded.posteriors, encoded.languages)
        from recognition.long_utterances import joined_hypothesis

        places = [[0, *(piece.first for piece in encoded.pieces.get(row, ()))] for row in range(len(encoded.frames))]
        spans = [
            (row, *span)
            for row, count in enumerate(encoded.frames.tolist())
            for span in pairwise([*places[row], count])
        ]
        found = iter(self._search_spans(encoded, spans))
        parts = [list(islice(found, len(firsts))) for firsts in places]
        return [
            some[0] if len(some) == 1 else joined_hypothesis(some, firsts, self._search.cfg.nbest)
            for some, firsts in zip(parts, places, strict=True)
        ]

    def _search_spans(self, encoded: EncodedFrames, spans: Sequence[tuple[int, int, int]]) -> Iterator[Hypothesis]:
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
            languages = encoded.languages and [encoded.languages[row] for row, _, _ in some]
            posteriors = tensors[1] if len(tensors) > 1 else None
            yield from self._search(tensors[0].to(self.device), counts, posteriors, languages)

    @override
    def prepare(self) -> None:
        self._search.prepare()

    @cached_property
    def _search(self) -> TokenSearch:
        self.spec.system.check_decoder(self.cfg.kind)
        search = self._make_search(self.cfg)
        search.comparable = self.spec.comparable
        return search

    @override
    def with_decoder(self, cfg: DecodeConfig) -> Self:
        other = copy(self)
        other.cfg, other._search = cfg, self._search.with_config(cfg)
        return other

    @override
    def times(self, encoded: EncodedFrames, row: int, begin: float = 0.0, end: float = math.inf) -> FrameTimes | None:
        assert isinstance(self.cfg, TokenSearchConfig)
        if self.cfg.times == "none":
            return None
        return self.frame_times(encoded.starts[row], begin, end, encoded.pieces.get(row, ()))
