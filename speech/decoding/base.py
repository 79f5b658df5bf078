"""The interface of decoders: log posteriors in, hypotheses out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from configurable.choices import ChoiceWithFiles
from configurable.lazy import torch
from speech.hmm.priors import StateOutputs
from speech.hypotheses import DecodeError, Hypothesis
from speech.tokens import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


class DecodeConfig(ChoiceWithFiles, ABC):
    """Base class of decoding configurations.

    Attributes:
        packages: Python packages that it needs beside the model's.
        lm_unit: What the language model in the field `lm` predicts: `word` or `token`; empty for decoders without one.
        reads_networks: Whether that language model may be a network.
        grid: Fields that are worth tuning on a validation set, with the values to try.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    lm_unit: ClassVar[str] = ""
    reads_networks: ClassVar[bool] = False
    grid: ClassVar[Mapping[str, tuple[float, ...]]] = {}

    @abstractmethod
    def build(self, tokenizer: Tokenizer, states: StateOutputs | None = None) -> Decoder:
        """Make the decoder; see `Decoder`."""

    def lacking(self) -> str:
        """What the decoder needs and the configuration does not name, with the remedy; empty if nothing is missing."""
        return ""

    @property
    def takes_language_model(self) -> bool:
        """Whether it reads a language model and names none."""
        return bool(self.lm_unit) and "lm" not in self.files()

    @property
    def makes_graph(self) -> bool:
        """Whether it searches a decoding graph that has to be made first."""
        return False

    @property
    def languages_given(self) -> bool:
        """Whether a model with tokens of languages is told the languages that the data name."""
        return False

    @property
    def untimed(self) -> Self:
        """This configuration without times of words, if these have their costs; by default itself."""
        return self

    def completed(self, files: Mapping[str, str]) -> Self:
        """This configuration with files that it needs and does not name.

        Args:
            files: Paths by field, such as `lm` and `words`; fields that name a file keep it.
        """
        needed = self.file_fields.keys() & type(self).model_fields.keys()  # those of parts are given or not
        missing = {name: path for name, path in files.items() if name in needed and not getattr(self, name)}
        return self.model_copy(update=missing)

    def with_nbest(self, count: int) -> Self:
        """This configuration with a number of hypotheses to give of each utterance.

        Raises:
            DecodeError: The decoder finds one only, or the number is below 1.
        """
        if "nbest" not in type(self).model_fields:
            raise DecodeError(
                f"decode.kind {self.kind} finds one hypothesis of an utterance: set decode.kind to a search, such as "
                "beam or words, and register the model again; it need not be trained again"
            )
        if count < 1:
            raise DecodeError(f"the number of hypotheses must be 1 or more, not {count}")
        return self.model_copy(update={"nbest": count})

    def with_hot_words(self, file: str, score: float | None = None) -> DecodeConfig:
        """This configuration with other hot words.

        Args:
            file: Lists them, see `speech.decoding.hot_words`.
            score: Added for each of their letters; by default as `HotWordsConfig` says.

        Raises:
            DecodeError: The decoder takes none, or the file cannot be read.
        """
        raise DecodeError(f"decode.kind {self.kind} takes no hot words: use a search, such as beam or words")

    def with_normalized_phrases(self, normalize: Callable[[str], str]) -> Self:
        """This configuration with hot words, if it has any, in the form of the texts that are searched.

        Args:
            normalize: Gives a phrase this form.

        Raises:
            DecodeError: Their file cannot be read.
        """
        return self

    def prepared(self, folder: Path) -> Self:
        """This configuration with all files that decoding needs; those that must be made are written to a folder."""
        return self


class DecoderStream(ABC):
    """The search in one utterance whose frames come one after another; it finds what `Decoder.decode` finds in all."""

    @abstractmethod
    def accept(self, log_probs: NDArray[np.float32]) -> None:
        """Go on with further frames [frames, outputs], one or more."""

    @abstractmethod
    def best(self) -> Hypothesis:
        """The best hypothesis of the frames so far, which later ones may change."""

    @abstractmethod
    def finish(self) -> Hypothesis:
        """The hypothesis of the whole utterance: nothing follows."""


class Decoder(ABC):
    """Finds the best hypotheses for log posteriors of tokens or states. Subclasses decode a validated batch.

    Args:
        cfg: Its configuration.
        tokenizer: The model's tokens.
        states: The model's tied states, if its outputs are these.

    Attributes:
        slow: Whether it takes longer than the model, so that several processes are worth their start.
        native: Attributes with native objects, None until they are read from files; another process reads them again.
    """

    slow: bool = False
    native: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cfg: DecodeConfig, tokenizer: Tokenizer, states: StateOutputs | None = None) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.states = states

    def __getstate__(self) -> dict[str, object]:
        """State for another process, without native objects."""
        return self.__dict__ | dict.fromkeys(self.native)

    @property
    def num_outputs(self) -> int:
        """Width of the posteriors: tied states, or tokens."""
        return len(self.states.log_priors) if self.states else self.tokenizer.size

    def with_config(self, cfg: DecodeConfig) -> Decoder:
        """A decoder of the same kind with other parameters; it shares files that this one has read."""
        return type(self)(cfg, self.tokenizer, self.states)

    def prepare(self) -> None:  # noqa: B027 - most have no files
        """Read what files it needs now, not at the first utterance."""

    def stream(self) -> DecoderStream:
        """Begin the search in an utterance whose frames come one after another.

        Raises:
            DecodeError: Decoders of this kind search whole utterances.
        """
        raise DecodeError(
            f"decode.kind {self.cfg.kind} searches whole utterances: use greedy, beam, tokens or words to recognize "
            "speech as it comes"
        )

    @property
    def silence(self) -> frozenset[int]:
        """Outputs that stand for silence: the blank, or the tied states of silence."""
        return frozenset({self.tokenizer.blank})

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """Returns the best hypothesis of each utterance.

        Args:
            log_probs: Natural log posteriors (log softmax), [B, T, V] on any device; V is the tokenizer's size, the
                blank comes first.
            lengths: Number of frames of each utterance, [B]; frames beyond are padding and ignored.

        Raises:
            DecodeError: The shapes or lengths are invalid, or a log posterior is NaN.
        """
        log_probs, frame_counts = self._check(log_probs, lengths)
        return self._decode(log_probs, frame_counts)

    @abstractmethod
    def _decode(self, log_probs: Tensor, lengths: Sequence[int]) -> list[Hypothesis]:
        """Decodes validated float32 log posteriors [B, T, V]."""

    def _check(self, log_probs: Tensor, lengths: Tensor) -> tuple[Tensor, list[int]]:
        if log_probs.dim() != 3 or log_probs.shape[2] != self.num_outputs:
            what = "states" if self.states else "tokens"
            raise DecodeError(
                f"log_probs must be [batch, frames, {self.num_outputs} {what}], not {list(log_probs.shape)}: "
                "the model and the tokenizer must belong together"
            )
        batch, num_frames, _ = log_probs.shape
        counts = [int(count) for count in lengths.tolist()]
        if len(counts) != batch or any(not 0 <= count <= num_frames for count in counts):
            raise DecodeError(f"lengths must be {batch} numbers in 0 to {num_frames}, not {counts}")
        log_probs = log_probs.detach().float()
        valid = (
            torch.arange(num_frames, device=log_probs.device) < torch.tensor(counts, device=log_probs.device)[:, None]
        )
        if bool((log_probs.isnan().any(dim=2) & valid).any()):
            raise DecodeError("log_probs contains NaN: the model has diverged, or its input was damaged")
        return log_probs, counts

    def _hypothesis(
        self, tokens: list[int], frames: list[int], peaks: Sequence[float], score: float, silence: float
    ) -> Hypothesis:
        """Builds a hypothesis; without tokens, its confidence is `silence`, the blank's mean posterior."""
        confidence = sum(peaks) / len(peaks) if peaks else silence
        return Hypothesis(tokens, self.tokenizer.decode(tokens), score, frames, min(max(float(confidence), 0.0), 1.0))
