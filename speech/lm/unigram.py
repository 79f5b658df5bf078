"""The bag of words: every word by its frequency alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from speech.lm.base import Estimator, LmConfig, Unit
from speech.lm.ngram_estimator import NgramConfig, NgramEstimator

if TYPE_CHECKING:
    from speech.lm.network import NetworkTrainer


class UnigramConfig(LmConfig):
    """A bag of words: the relative frequency of every word."""

    kind: Literal["unigram"] = "unigram"
    unit: Unit = "word"
    """What is predicted; with characters, "▁" stands between words; `token` is the acoustic model's."""
    vocabulary: int | None = Field(default=None, ge=1)
    """Greatest number of words, the most frequent ones; None for all."""

    @override
    def build(self, trainer: NetworkTrainer | None = None) -> Estimator:
        return UnigramEstimator(self, trainer)


class UnigramEstimator(NgramEstimator):
    """An n-gram model of order 1 with Witten-Bell's share for unknown words: (c(w) + T / V) / (N + T)."""

    def __init__(self, cfg: UnigramConfig, trainer: NetworkTrainer | None = None) -> None:
        ngrams = NgramConfig(order=1, unit=cfg.unit, smoothing="witten-bell", vocabulary=cfg.vocabulary, text=cfg.text)
        super().__init__(ngrams, trainer)
