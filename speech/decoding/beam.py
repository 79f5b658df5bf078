"""CTC prefix beam search: the token sequence with the highest probability summed over its alignments.

The search itself is flashlight-text's, in C++. What it needs to be exact is not in its manual:

- `log_add=True`: otherwise it scores the best alignment only;
- a silence token stands before the first and after the last frame and must not be a real token, else that token's first
  occurrence counts as a repetition: we append a column that is never chosen and call it silence;
- minus infinity must not reach it: the difference of two of them is NaN.

It holds Python's interpreter lock, so decode in several processes, not in threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from speech.decoding.base import DecodeConfig, Decoder, Hypothesis
from speech.decoding.language_model import LanguageModel, zero_lm
from speech.decoding.paths import collapse, emissions_for


class _Result(Protocol):
    tokens: list[int]
    score: float


class _Search(Protocol):
    """What we use of flashlight-text's decoder, which comes without types."""

    def decode(self, emissions: int, num_frames: int, num_tokens: int, /) -> list[_Result]: ...


class BeamConfig(DecodeConfig):
    """The best token sequence over all its alignments."""

    kind: Literal["beam"] = "beam"
    beam: int = Field(default=16, ge=1)
    """Number of partial hypotheses that are kept after each frame."""
    beam_tokens: int = Field(default=0, ge=0)
    """Number of tokens tried in each frame, the most probable ones; 0 for all. 20 makes a search over 500 tokens
    some ten times as fast."""
    beam_threshold: float = Field(default=25.0, gt=0)
    """A partial hypothesis is dropped when its natural log probability is this much below the best one's."""


class BeamDecoder(Decoder):
    """Prefix beam search (Graves 2012, "Supervised Sequence Labelling", section 7.5; Hannun 2014, arXiv 1408.2873)."""

    config: ClassVar[type[DecodeConfig]] = BeamConfig
    cfg: BeamConfig

    def _decode(self, log_probs: Tensor, lengths: Sequence[int]) -> list[Hypothesis]:
        search = self._search()
        batch = log_probs.cpu().numpy()
        return [self._one(search, batch[row, :count]) for row, count in enumerate(lengths)]

    def _model(self) -> tuple[LanguageModel, float]:
        """The language model of tokens, and its weight."""
        return zero_lm(), 0.0

    def _search(self) -> _Search:
        # Made for each batch: it costs microseconds, and a decoder without native state can go to another process.
        from flashlight.lib.text.decoder import CriterionType, LexiconFreeDecoder, LexiconFreeDecoderOptions

        size = self.tokenizer.size
        lm, lm_weight = self._model()
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
        num_frames, size = log_probs.shape
        if num_frames == 0:
            return Hypothesis()
        emissions = emissions_for(log_probs, size + 1, num_frames)
        result = search.decode(emissions.ctypes.data, num_frames, size + 1)[0]
        path = np.asarray(result.tokens[1:-1])
        posteriors = np.exp(emissions[np.arange(num_frames), path])
        tokens, frames, peaks = collapse(path, posteriors, self.tokenizer.blank)
        silence = float(np.exp(emissions[:, self.tokenizer.blank]).mean())
        return self._hypothesis(tokens, frames, peaks, float(result.score), silence)
