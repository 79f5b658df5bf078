"""The bag of words: every word by its frequency alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from typing_extensions import override

from speech.lm.base import Estimator, LanguageModel, LmConfig, Unit
from speech.lm.ngram_estimator import NgramConfig, NgramEstimator
from speech.lm.sources import Text


class UnigramConfig(LmConfig):
    """Words without context."""

    kind: Literal["unigram"] = "unigram"
    unit: Unit = "word"
    """What is predicted; with characters, "▁" stands between words; `token` is the acoustic model's."""
    vocabulary: int | None = Field(default=None, ge=1)
    """Greatest number of words, the most frequent ones; None for all."""


class UnigramEstimator(Estimator):
    """An n-gram model of order 1 with Witten-Bell's share for unknown words: (c(w) + T / V) / (N + T)."""

    config = UnigramConfig
    cfg: UnigramConfig

    @property
    @override
    def unit(self) -> Unit:
        return self.cfg.unit

    @property
    @override
    def arpa(self) -> str:
        return self._ngram().arpa

    @override
    def estimate(self, text: Text, folder: Path, workers: int = 1) -> tuple[LanguageModel, dict[str, Any]]:
        return self._ngram().estimate(text, folder, workers)

    @override
    def load(self, folder: Path) -> LanguageModel:
        return self._ngram().load(folder)

    def _ngram(self) -> NgramEstimator:
        cfg = self.cfg
        return NgramEstimator(
            NgramConfig(order=1, unit=cfg.unit, smoothing="witten-bell", vocabulary=cfg.vocabulary, text=cfg.text)
        )
