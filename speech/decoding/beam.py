"""CTC prefix beam search: finds the token sequence with the highest probability, summed over its alignments.

Uses the C++ search of flashlight-text. To be exact, it has undocumented requirements:

- `log_add=True`: otherwise it scores the best alignment only;
- the search adds a silence token before the first and after the last frame; it must not be a real token, or that
  token's first occurrence would count as a repetition. A column that is never chosen is appended for it;
- scores must not be minus infinity: the difference of two of them is NaN.

It holds the GIL: use several processes to decode in parallel, not threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from speech.decoding.base import DecodeConfig, Decoder, DecoderStream
from speech.decoding.hot_words import BiasedConfig, HotWords, hot_tokens
from speech.decoding.nbest import merged_texts
from speech.decoding.paths import collapse, emissions_for
from speech.hypotheses import Hypothesis
from speech.lm.kenlm import FlashlightLm, zero_lm

if TYPE_CHECKING:
    from torch import Tensor

    from speech.hmm.priors import StateOutputs
    from speech.tokens import Tokenizer


class _Result(Protocol):
    tokens: list[int]
    score: float


class _Search(Protocol):
    """The part of flashlight-text's untyped decoder that is used here; its `decode` makes the same calls."""

    def decode_begin(self) -> None: ...

    def decode_step(self, emissions: int, num_frames: int, num_tokens: int, /) -> None: ...

    def decode_end(self) -> None: ...

    def get_best_hypothesis(self) -> _Result: ...

    def get_all_final_hypothesis(self) -> list[_Result]: ...


class BeamConfig(BiasedConfig):
    """Beam search for the most probable token sequence over all its alignments."""

    kind: Literal["beam"] = "beam"
    packages: ClassVar[tuple[str, ...]] = ("flashlight-text",)
    beam: int = Field(default=16, ge=1)
    """Number of partial hypotheses kept after each frame."""
    beam_tokens: int = Field(default=0, ge=0)
    """Number of most probable tokens tried in each frame; 0 for all. With 500 tokens, 20 makes the search about ten
    times as fast."""
    beam_threshold: float = Field(default=25.0, gt=0)
    """Partial hypotheses are dropped if their natural log probability is this far below the best one."""
    nbest: int = Field(default=1, ge=1)
    """Number of hypotheses that are given of each utterance."""

    @override
    def build(self, tokenizer: Tokenizer, states: StateOutputs | None = None) -> Decoder:
        return BeamDecoder(self, tokenizer, states)


class BeamDecoder(Decoder):
    """Prefix beam search (Graves 2012, "Supervised Sequence Labelling", section 7.5; Hannun 2014, arXiv 1408.2873)."""

    cfg: BeamConfig

    def __init__(self, cfg: DecodeConfig, tokenizer: Tokenizer, states: StateOutputs | None = None) -> None:
        super().__init__(cfg, tokenizer, states)
        self.slow = self.slow or bool(self.cfg.hot_words.file or self.cfg.hot_words.phrases)

    @cached_property
    def _hot(self) -> HotWords | None:
        return hot_tokens(self.cfg.hot_words, self.tokenizer)

    def prepare(self) -> None:
        """Read the hot words now, not at the first utterance.

        Raises:
            DecodeError: They cannot be read.
        """
        _ = self._hot

    @override
    def stream(self) -> DecoderStream:
        lm, lm_weight = self._biased()
        return _BeamStream(self, self._search(lm, lm_weight), lm)

    def _decode(self, log_probs: Tensor, lengths: Sequence[int]) -> list[Hypothesis]:
        lm, lm_weight = self._biased()
        search = self._search(lm, lm_weight)  # which does not keep the model alive
        batch = log_probs.cpu().numpy()
        return [self._one(search, batch[row, :count]) for row, count in enumerate(lengths)]

    def _model(self) -> tuple[FlashlightLm, float]:
        """The language model of tokens, and its weight."""
        return zero_lm(), 0.0

    def _biased(self) -> tuple[FlashlightLm, float]:
        """The language model with what hot words add, and its weight."""
        lm, lm_weight = self._model()
        if not self._hot:
            return lm, lm_weight
        from speech.decoding.biased_lm import BiasedLm

        return BiasedLm(lm, lm_weight, self._hot), 1.0

    def _search(self, lm: FlashlightLm, lm_weight: float) -> _Search:
        # Created for each batch in microseconds: without native state, the decoder can be sent to another process.
        from flashlight.lib.text.decoder import CriterionType, LexiconFreeDecoder, LexiconFreeDecoderOptions

        size = self.tokenizer.size
        options = LexiconFreeDecoderOptions(
            beam_size=self.cfg.beam,
            beam_size_token=min(self.cfg.beam_tokens or size, size),
            beam_threshold=self.cfg.beam_threshold,
            lm_weight=lm_weight,
            sil_score=0.0,
            log_add=True,
            criterion_type=CriterionType.CTC,
        )
        search: _Search = LexiconFreeDecoder(options, lm, size, self.tokenizer.blank, [])
        return search

    def _one(self, search: _Search, log_probs: NDArray[np.float32]) -> Hypothesis:
        stream = _BeamStream(self, search)
        if len(log_probs):
            stream.accept(log_probs)
        return stream.finish()

    def found(self, results: Sequence[_Result], emissions: NDArray[np.float32]) -> Hypothesis:
        """The best of some results, the best first, with the others if they are asked for.

        Args:
            results: Of the search.
            emissions: What it has read [frames, tokens + 1].
        """
        num_frames = len(emissions)
        path = np.asarray(results[0].tokens[1 : num_frames + 1])
        posteriors = np.exp(emissions[np.arange(num_frames), path])
        tokens, frames, peaks = collapse(path, posteriors, self.tokenizer.blank)
        silence = float(np.exp(emissions[:, self.tokenizer.blank]).mean())
        best = self._hypothesis(tokens, frames, peaks, float(results[0].score), silence)
        if self.cfg.nbest == 1:
            return best
        texts = [self._text(result, num_frames) for result in results]
        return replace(best, nbest=merged_texts(texts, [float(result.score) for result in results], self.cfg.nbest))

    def _text(self, result: _Result, num_frames: int) -> str:
        path = np.asarray(result.tokens[1 : num_frames + 1])
        return self.tokenizer.decode(collapse(path, np.zeros(len(path)), self.tokenizer.blank)[0])


class _BeamStream(DecoderStream):
    """The native search, which remembers its partial hypotheses, and what it has read.

    Args:
        decoder: Whose hypotheses it makes.
        search: The native search, which no other stream uses meanwhile.
        lm: Its language model, which it does not keep alive; None if others do.
    """

    def __init__(self, decoder: BeamDecoder, search: _Search, lm: FlashlightLm | None = None) -> None:
        self._decoder, self._search, self._lm = decoder, search, lm
        self._emissions: list[NDArray[np.float32]] = []
        search.decode_begin()

    @override
    def accept(self, log_probs: NDArray[np.float32]) -> None:
        frames, size = log_probs.shape
        emissions = emissions_for(log_probs, size + 1, frames)
        self._search.decode_step(emissions.ctypes.data, frames, size + 1)
        self._emissions.append(emissions)

    @override
    def best(self) -> Hypothesis:
        return self._found([self._search.get_best_hypothesis()])

    @override
    def finish(self) -> Hypothesis:
        self._search.decode_end()
        return self._found(self._search.get_all_final_hypothesis())

    def _found(self, results: list[_Result]) -> Hypothesis:
        if not self._emissions:
            return Hypothesis()
        return self._decoder.found(results, np.concatenate(self._emissions))
