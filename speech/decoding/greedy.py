"""Greedy decoding: the best token of every frame, repetitions merged, blanks removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from typing_extensions import override

from speech.decoding.base import DecodeConfig, Decoder
from speech.decoding.paths import collapse
from speech.hypotheses import Hypothesis

if TYPE_CHECKING:
    from torch import Tensor

    from speech.hmm.priors import StateOutputs
    from speech.tokens import Tokenizer


class GreedyConfig(DecodeConfig):
    """Greedy decoding: the best token of every frame."""

    kind: Literal["greedy"] = "greedy"

    @override
    def with_hot_words(self, file: str, score: float | None = None) -> DecodeConfig:
        from speech.decoding.beam import BeamConfig

        search = BeamConfig().with_hot_words(file, score)  # phrases need a search; without any, nothing changes
        return search if search.hot_words.read() else self

    @override
    def build(self, tokenizer: Tokenizer, states: StateOutputs | None = None) -> Decoder:
        return GreedyDecoder(self, tokenizer, states)


class GreedyDecoder(Decoder):
    """Decodes the single best alignment (best path decoding, Graves 2006, section 3.2).

    It is fast, and nearly as good as a search when the posteriors are sharp.
    """

    def _decode(self, log_probs: Tensor, lengths: Sequence[int]) -> list[Hypothesis]:
        if log_probs.shape[1] == 0:
            return [Hypothesis() for _ in lengths]
        best, path = log_probs.max(dim=2)
        # Copy three small arrays from the device, not all posteriors.
        best_BT, path_BT, blank_BT = best.cpu().numpy(), path.cpu().numpy(), log_probs[:, :, 0].cpu().numpy()
        return [
            self._one(path_BT[row, :count], best_BT[row, :count], blank_BT[row, :count])
            for row, count in enumerate(lengths)
        ]

    def _one(self, path: np.ndarray, best: np.ndarray, blank: np.ndarray) -> Hypothesis:
        if len(path) == 0:
            return Hypothesis()
        tokens, frames, peaks = collapse(path, np.exp(best), self.tokenizer.blank)
        return self._hypothesis(tokens, frames, peaks, float(best.sum(dtype=np.float64)), float(np.exp(blank).mean()))
