"""The interface of recognizers, in two steps: an encoder, and a search. All that turns audio into text uses it.

    recognizer = Recognizer.load(folder)
    hypotheses = recognizer.search(recognizer.encode(waves, lengths))

What is between the two steps only the recognizer knows: log posteriors of frames, states of an encoder, adapted
features. Others keep it, give it back, or send it to another process in the form of `arrays`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from numpy.typing import NDArray

from recognition.bundle import BundleSpec, load_spec, own_decoder
from speech.hypotheses import DecodeError, Hypothesis, Word
from speech.scripts import primary

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from speech.decoding import DecodeConfig
    from speech.features.cmvn import CmvnStats
    from speech.words import FrameTimes

E = TypeVar("E")
Arrays = dict[str, NDArray[Any]]
"""What an encoder gave for one utterance, for another process."""


Adapter = Callable[[Iterable["Tensor"]], list["Tensor"]]
"""From one speaker's waveforms [samples] in ±1 to features [frames, F] of each, adapted to this speaker. Each waveform
is read once; the more there are, the better the adaptation."""


class Elsewhere(NamedTuple, Generic[E]):
    """How other processes search."""

    search: Callable[[str, Arrays], Hypothesis]
    """A function of a module; it gets the description and the arrays of an utterance."""
    description: str
    """What the search is made from."""
    arrays: Callable[[E], list[Arrays]]
    """What other processes need of each utterance that has been encoded."""


class Recognizer(ABC, Generic[E]):
    """A bundle's model, ready to use; `E` is what its encoder gives for a batch.

    Args:
        spec: The bundle's contents without the weights.
        cfg: Decoding parameters.

    Attributes:
        together_s: Seconds of a speaker that are recognized together at most, if the system does that.
    """

    together_s: float = math.inf

    def __init__(self, spec: BundleSpec, cfg: DecodeConfig) -> None:
        self.spec, self.cfg = spec, cfg

    @staticmethod
    def load(
        folder: Path,
        decode: DecodeConfig | None = None,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> Recognizer[Any]:
        """Load a recognizer from a bundle's folder.

        Args:
            folder: The folder.
            decode: Decoding parameters; the bundle's own by default.
            device: Where networks compute, for example `cpu` or `cuda`.
            speakers: Statistics by speaker, for `cmvn: speaker`.

        Raises:
            BundleError: The folder is not a bundle, the bundle is damaged, or it lacks a file that it needs.
            DecodeError: A file with hot words cannot be read.
        """
        folder = Path(folder)
        spec = load_spec(folder)
        return spec.system.open(folder, spec, spec.searched(decode or own_decoder(folder)), device, speakers)

    # --- the two steps

    @abstractmethod
    def encode(
        self,
        inputs: Tensor,
        lengths: Tensor,
        speakers: Sequence[str] | None = None,
        languages: Sequence[str] | None = None,
    ) -> E:
        """Compute what the search reads.

        What is longer than the model can read is cut in pauses; the scores of the pieces are joined.

        Args:
            inputs: Waveforms [batch, samples] in ±1, stored features [batch, frames, F], or what `adapter` gives.
            lengths: Samples or frames of each utterance [batch].
            speakers: Speaker of each utterance, for `cmvn: speaker`.
            languages: Language of each utterance that the model is told, as `known_language` gives it; it finds the
                others itself.
        """

    @property
    def languages(self) -> Collection[str]:
        """Codes of the languages that the model can be told, of which it else finds one for each utterance."""
        return ()

    def known_language(self, language: str) -> str:
        """The code of a language that the model can be told; empty if it cannot.

        Args:
            language: BCP 47 tag.
        """
        code = primary(language)
        return code if code in self.languages else ""

    def check_language(self, language: str) -> None:
        """See that the model can be told a language.

        Raises:
            DecodeError: It cannot.
        """
        if not self.languages:
            raise DecodeError(
                "the model has no tokens of languages, it writes what it hears: leave the language out, or train one "
                "of kind attention with recognizer.decoder_network.language auto"
            )
        if not self.known_language(language):
            raise DecodeError(f"the model knows the languages {', '.join(self.languages)}, not {language!r}: give one")

    @abstractmethod
    def search(self, encoded: E) -> list[Hypothesis]:
        """The best hypothesis of each utterance.

        Raises:
            DecodeError: It contains NaN, or the decoder does not fit.
        """

    def prepare(self) -> None:
        """Read what files the search needs now, not at the first utterance."""

    @property
    def adapter(self) -> Adapter | None:
        """What makes the inputs of `encode` from all utterances of a speaker; None if that reads each one as it is."""
        return None

    # --- in other processes

    def elsewhere(self) -> Elsewhere[E] | None:
        """How other processes search; None if the search needs this process, or is too fast to be worth another."""
        return None

    # --- for tuning, and times of words; `spec.system.require` tells whether a system has these abilities

    @abstractmethod
    def with_decoder(self, cfg: DecodeConfig) -> Self:
        """This recognizer with another decoder of the same kind; it searches what this one has encoded."""

    def times(self, encoded: E, row: int, begin: float = 0.0, end: float = math.inf) -> FrameTimes | None:
        """When the frames are that hypotheses name; None if they name none.

        Args:
            encoded: What the hypothesis was found in.
            row: Number of the utterance in it.
            begin: Start of the utterance in its recording, seconds.
            end: Its end.
        """
        return None

    def timed_words(self, encoded: E, row: int, hypothesis: Hypothesis, times: FrameTimes) -> list[Word]:
        """The words of a hypothesis with their times.

        Args:
            encoded: What the hypothesis was found in.
            row: Number of the utterance in it.
            hypothesis: The hypothesis.
            times: What `times` gives.
        """
        from speech.words import placed_words

        confidences = hypothesis.word_confidences or [hypothesis.confidence] * len(hypothesis.word_frames)
        return placed_words(hypothesis.text, hypothesis.word_frames, confidences, times)
