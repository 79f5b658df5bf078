"""Greedy decoding: the best token of every frame, repetitions merged, blanks removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from speech.decoding.base import DecodeConfig, Decoder, DecoderStream
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

    @override
    def stream(self) -> DecoderStream:
        return _GreedyStream(self)

    def _decode(self, log_probs: Tensor, lengths: Sequence[int]) -> list[Hypothesis]:
        if log_probs.shape[1] == 0:
            return [Hypothesis() for _ in lengths]
        best, path = log_probs.max(dim=2)
        # Copy three small arrays from the device, not all posteriors.
        best_BT, path_BT, blank_BT = best.cpu().numpy(), path.cpu().numpy(), log_probs[:, :, 0].cpu().numpy()
        return [
            self.collapsed(path_BT[row, :count], best_BT[row, :count], blank_BT[row, :count])
            for row, count in enumerate(lengths)
        ]

    def collapsed(self, path: np.ndarray, best: np.ndarray, blank: np.ndarray) -> Hypothesis:
        """The hypothesis of an alignment.

        Args:
            path: The best token of each frame.
            best: Its log posterior.
            blank: The blank's.
        """
        if len(path) == 0:
            return Hypothesis()
        tokens, frames, peaks = collapse(path, np.exp(best), self.tokenizer.blank)
        return self._hypothesis(tokens, frames, peaks, float(best.sum(dtype=np.float64)), float(np.exp(blank).mean()))


class _GreedyStream(DecoderStream):
    """Remembers the best token of each frame and two log posteriors."""

    def __init__(self, decoder: GreedyDecoder) -> None:
        self._decoder = decoder
        self._parts: list[NDArray[np.float32]] = []
        self._paths: list[NDArray[np.int64]] = []

    @override
    def accept(self, log_probs: NDArray[np.float32]) -> None:
        self._paths.append(log_probs.argmax(axis=1))
        self._parts.append(np.stack([log_probs.max(axis=1), log_probs[:, 0]]))

    @override
    def best(self) -> Hypothesis:
        if not self._paths:
            return Hypothesis()
        best, blank = np.concatenate(self._parts, axis=1)
        return self._decoder.collapsed(np.concatenate(self._paths), best, blank)

    @override
    def finish(self) -> Hypothesis:
        return self.best()
