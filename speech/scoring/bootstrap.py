"""Confidence intervals of word error rates, and significance tests of two systems on the same utterances.

Whole utterances are resampled with replacement, because errors within an utterance are not independent; the rate of a
resample is its errors over its words (Bisani and Ney, ICASSP 2004, "Bootstrap estimates for confidence intervals in ASR
performance evaluation"). Two systems are compared on the same resamples, so that the difficulty of the utterances
cancels.

Utterances of one speaker are not independent either: a recognizer that fails on a voice fails on all of its utterances.
An interval that is to hold for other speakers resamples whole speakers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from configurable.wording import counted
from speech.scoring.counts import ScoringError

# Utterances drawn at once: limits memory to about 10 MB for test sets of any size.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Comparison:
    """Comparison of system B with system A on the same utterances."""

    delta: float
    """WER of B minus WER of A, as a fraction: negative where B is better."""
    low: float
    """Lower end of the bootstrap interval of `delta`."""
    high: float
    """Upper end of the bootstrap interval of `delta`."""
    p_value: float
    """Two-sided p-value of the matched-pair test: probability of such a difference between equally good systems."""
    better: Literal["a", "b"] | None
    """The significantly better system: the test rejects equality and the interval excludes zero; else None."""
    probability_of_improvement: float
    """Share of the resamples in which B has fewer errors than A, ties counted half."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value."""
        return asdict(self)


def wer_interval(
    errors: ArrayLike,
    words: ArrayLike,
    *,
    speakers: Sequence[str] | None = None,
    level: float = 0.95,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the word error rate (Bisani and Ney 2004, section 2).

    Args:
        errors: Word errors of each utterance, [N].
        words: Reference words of each utterance, [N].
        speakers: Speaker of each utterance, [N], to resample whole speakers; utterances are resampled without it.
        level: Coverage of the interval.
        samples: Number of resamples.
        seed: The same seed gives the same interval.

    Returns:
        Lower and upper end, as fractions.

    Raises:
        ScoringError: The arrays do not match, there are no reference words, or some speakers are unknown.
    """
    error_counts, word_counts = _arrays(errors, words)
    if speakers is not None:
        error_counts, word_counts = _by_speaker(error_counts, word_counts, speakers)
    rates = _resampled(error_counts[:, None], word_counts, samples, seed)[:, 0]
    return _percentiles(rates, level)


def compare_systems(
    errors_a: ArrayLike,
    errors_b: ArrayLike,
    words: ArrayLike,
    *,
    level: float = 0.95,
    samples: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Tests whether system B is better or worse than system A.

    The p-value is that of the matched-pair sentence-segment test (Gillick and Cox, ICASSP 1989) with utterances as
    segments. The test assumes a normally distributed mean difference, so it needs about 50 utterances. The interval is
    the paired bootstrap of Bisani and Ney 2004, section 3.

    Args:
        errors_a: Word errors of system A in each utterance, [N].
        errors_b: Word errors of system B in the same utterances, [N].
        words: Reference words of each utterance, [N].
        level: Coverage of the interval, and 1 − level the significance of the test.
        samples: Number of resamples.
        seed: The same seed gives the same interval.

    Raises:
        ScoringError: The arrays do not match, or there are no reference words.
    """
    counts_a, word_counts = _arrays(errors_a, words)
    counts_b, _ = _arrays(errors_b, words)
    rates = _resampled(np.stack([counts_a, counts_b], axis=1), word_counts, samples, seed)
    differences = rates[:, 1] - rates[:, 0]
    delta = float((counts_b.sum() - counts_a.sum()) / word_counts.sum())
    low, high = _percentiles(differences, level)
    p_value = matched_pair_p_value(counts_a, counts_b)
    better: Literal["a", "b"] | None = None
    if p_value < 1 - level and not low <= 0 <= high:
        better = "b" if delta < 0 else "a"
    share = float((differences < 0).mean() + (differences == 0).mean() / 2)
    return Comparison(delta, low, high, p_value, better, share)


def matched_pair_p_value(errors_a: ArrayLike, errors_b: ArrayLike) -> float:
    """Two-sided p-value of the matched-pair test (Gillick and Cox 1989, section 4) over per-utterance errors, [N]."""
    differences = np.asarray(errors_b, dtype=np.float64) - np.asarray(errors_a, dtype=np.float64)
    count = len(differences)
    if not differences.any():
        return 1.0
    if count < 2 or differences.std() == 0:
        # Equal differences have no variance to estimate; use a sign test.
        return min(1.0, 2.0 ** (1 - count))
    z = differences.mean() / (differences.std(ddof=1) / math.sqrt(count))
    return math.erfc(abs(z) / math.sqrt(2))


def _arrays(errors: ArrayLike, words: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    error_counts, word_counts = np.asarray(errors, dtype=np.int64), np.asarray(words, dtype=np.int64)
    if error_counts.ndim != 1 or error_counts.shape != word_counts.shape:
        raise ScoringError(
            f"errors {list(error_counts.shape)} and words {list(word_counts.shape)} must be one number for each of the "
            "same utterances"
        )
    if word_counts.sum() == 0:
        raise ScoringError("there are no reference words, so there is no word error rate")
    return error_counts, word_counts


def _by_speaker(
    errors: NDArray[np.int64], words: NDArray[np.int64], speakers: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Errors and words of each speaker, in order of names."""
    if len(speakers) != len(words):
        raise ScoringError(f"{len(speakers)} speakers for {len(words)} utterances: give each utterance one")
    if unnamed := sum(not name for name in speakers):
        raise ScoringError(f"{counted(unnamed, 'utterance')} without a speaker: resample utterances, not speakers")
    names, members = np.unique(np.asarray(speakers, dtype=object).astype(str), return_inverse=True)
    sums = []
    for counts in (errors, words):
        total = np.zeros(len(names), dtype=np.int64)
        np.add.at(total, members, counts)
        sums.append(total)
    return sums[0], sums[1]


def _resampled(errors: NDArray[np.int64], words: NDArray[np.int64], samples: int, seed: int) -> NDArray[np.float64]:
    """Word error rates [samples, systems] of sets drawn with replacement from utterances' errors [N, systems]."""
    rates = []
    for draws in _draws(len(words), samples, seed):
        total = words[draws].sum(axis=1)
        wrong = errors[draws].sum(axis=1)
        # A resample without reference words has no rate and is left out.
        rates.append(wrong[total > 0] / total[total > 0, None])
    return np.concatenate(rates)


def _draws(count: int, samples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // count)
    for start in range(0, samples, rows):
        yield generator.integers(count, size=(min(rows, samples - start), count))


def _percentiles(values: NDArray[np.float64], level: float) -> tuple[float, float]:
    if len(values) == 0:
        raise ScoringError("no resample held a reference word: the set is too small for an interval")
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
