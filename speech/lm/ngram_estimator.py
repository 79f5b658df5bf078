"""The n-gram language model: its configuration, and how it is estimated."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from speech.lm.arpa import read_arpa, write_arpa
from speech.lm.base import Estimator, LmConfig, Unit
from speech.lm.counting import count_ngrams
from speech.lm.encoding import encode_text
from speech.lm.estimation import Method, smoothed
from speech.lm.ngram import NgramModel
from speech.lm.pruning import entropy_pruned
from speech.lm.sources import Text
from speech.lm.vocabulary import SPECIAL

if TYPE_CHECKING:
    from speech.lm.network import NetworkTrainer


class NgramConfig(LmConfig):
    """N-grams of words, characters or tokens, of any order, with back-off."""

    kind: Literal["ngram"] = "ngram"
    order: int = Field(default=3, ge=1, le=12)
    """Number of words of the longest n-grams."""
    unit: Unit = "word"
    """What is predicted; with characters, "▁" stands between words; `token` is the acoustic model's."""
    smoothing: Method = "kneser-ney"
    """`witten-bell` for few and frequent units, where Kneser-Ney's discounts cannot be estimated."""
    discount_fallback: tuple[float, float, float] | None = None
    """Discounts of counts 1, 2, and 3 and more, for orders in which they cannot be estimated. None: an error."""
    cutoffs: tuple[int, ...] = ()
    """For each order the highest count that is removed, not descending; the last holds for all further orders. `[0, 0,
    1]` removes trigrams that occur once."""
    vocabulary: int | None = Field(default=None, ge=1)
    """Greatest number of words, the most frequent ones; None for all."""
    prune: float = Field(default=0.0, ge=0, lt=1)
    """Threshold of entropy pruning: the relative rise of perplexity for which an n-gram stays; 0 for none."""
    compress: bool = False
    """Writes `lm.arpa.gz`."""

    @model_validator(mode="before")
    @classmethod
    def _own_estimation(cls, value: Any) -> Any:
        if isinstance(value, dict) and "lmplz" in value:
            raise ValueError("lmplz is no option any more, Starling estimates the same n-grams itself: remove it")
        return value

    @field_validator("cutoffs")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(count < 0 for count in value) or list(value) != sorted(value):
            raise ValueError("must not descend, as [0, 0, 1]: else n-grams would stay without their contexts")
        return value

    @field_validator("discount_fallback")
    @classmethod
    def _possible(cls, value: tuple[float, float, float] | None) -> tuple[float, float, float] | None:
        if value is not None and not all(0 <= amount <= count for count, amount in enumerate(value, 1)):
            raise ValueError("must be three numbers in 0 to 1, 0 to 2 and 0 to 3, as [0.5, 1.0, 1.5]")
        return value

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if len(self.cutoffs) > self.order:
            raise ValueError(f"cutoffs has {len(self.cutoffs)} numbers, but order is {self.order}")
        return self

    @override
    def build(self, trainer: NetworkTrainer | None = None) -> Estimator:
        return NgramEstimator(self, trainer)


class NgramEstimator(Estimator):
    """Counts, smooths and prunes n-grams, and writes `lm.arpa`."""

    cfg: NgramConfig

    @property
    @override
    def unit(self) -> Unit:
        return self.cfg.unit

    @override
    def estimate(self, text: Text, folder: Path, workers: int = 1) -> tuple[NgramModel, dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix=".lm-", dir=folder) as scratch:
            model, facts = self._by_counting(text, Path(scratch), workers)
        if self.cfg.prune:
            facts["ngrams_before_pruning"] = list(model.tables.counts)
            model = entropy_pruned(model, self.cfg.prune)
        write_arpa(model, folder / self.arpa)
        return model, facts | {"ngrams": list(model.tables.counts), "bytes_in_memory": model.num_bytes}

    @property
    @override
    def arpa(self) -> str:
        return "lm.arpa.gz" if self.cfg.compress else "lm.arpa"

    @override
    def load(self, folder: Path) -> NgramModel:
        return read_arpa(folder / self.arpa)

    def _by_counting(self, text: Text, scratch: Path, workers: int) -> tuple[NgramModel, dict[str, Any]]:
        encoded = encode_text(text, scratch)
        counts = count_ngrams(encoded, self.cfg.order, scratch, workers)
        model, discounts = smoothed(
            encoded.words,
            counts,
            self.cfg.smoothing,
            scratch,
            cutoffs=self.cfg.cutoffs,
            allowed=most_frequent(counts[0].counts, self.cfg.vocabulary),
            fallback=self.cfg.discount_fallback,
            workers=workers,
        )
        amounts = [list(of_order.amounts) for of_order in discounts]
        return model, {"text": dict(encoded.counts), "discounts": amounts}


def most_frequent(counts: NDArray[np.int64], limit: int | None) -> NDArray[np.bool_] | None:
    """Mask of the most frequent words, `[words]`; of equally frequent ones those that come first. None for no limit."""
    if limit is None or limit >= len(counts) - len(SPECIAL):
        return None
    chosen = np.argsort(-counts[len(SPECIAL) :], kind="stable")[:limit] + len(SPECIAL)
    allowed = np.zeros(len(counts), dtype=np.bool_)
    allowed[chosen] = True
    return allowed
