"""Intervals and comparisons: against closed formulas, exact cases, and their promised coverage."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.scoring import ScoringError, compare_systems, matched_pair_p_value, wer_interval


def utterances(count, rate, seed=0):
    """Words and errors of a system whose word error rate is about `rate`; utterances differ in difficulty."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1, 30, size=count)
    difficulty = np.clip(rng.gamma(2.0, rate / 2, size=count), 0, 1)
    return rng.binomial(words, difficulty), words


def test_same_seed_gives_the_same_interval():
    errors, words = utterances(200, 0.2)
    assert wer_interval(errors, words) == wer_interval(errors, words)
    assert wer_interval(errors, words, seed=1) != wer_interval(errors, words, seed=2)


@given(count=st.integers(2, 60), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_the_interval_holds_the_rate_and_grows_with_the_level(count, seed):
    errors, words = utterances(count, 0.3, seed)
    low, high = wer_interval(errors, words)
    assert low <= high
    wide_low, wide_high = wer_interval(errors, words, level=0.999)
    assert wide_low <= low
    assert high <= wide_high
    assert wide_low <= errors.sum() / words.sum() <= wide_high


def test_width_agrees_with_the_normal_approximation():
    errors, words = utterances(3000, 0.2)
    rate = errors.sum() / words.sum()
    # Standard error of a ratio of sums (delta method).
    spread = np.std(errors - rate * words, ddof=1) * math.sqrt(len(words)) / words.sum()
    low, high = wer_interval(errors, words, samples=4000)
    assert low == pytest.approx(rate - 1.96 * spread, abs=0.1 * spread)
    assert high == pytest.approx(rate + 1.96 * spread, abs=0.1 * spread)


def test_intervals_have_the_nominal_coverage():
    population_errors, population_words = utterances(100_000, 0.2, seed=5)
    truth = population_errors.sum() / population_words.sum()
    rng, hits = np.random.default_rng(6), 0
    for trial in range(200):
        drawn = rng.integers(len(population_words), size=200)
        low, high = wer_interval(population_errors[drawn], population_words[drawn], samples=300, seed=trial)
        hits += low <= truth <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_chunks_do_not_change_the_number_of_resamples(monkeypatch):
    errors, words = utterances(50, 0.2)
    whole = wer_interval(errors, words)
    monkeypatch.setattr("speech.scoring.bootstrap._CHUNK", 170)
    assert wer_interval(errors, words) == whole


def test_utterances_without_words_are_accepted():
    low, high = wer_interval([1, 0, 2, 0], [0, 5, 0, 5], samples=200)
    assert 0 <= low <= high
    with pytest.raises(ScoringError, match="no reference words"):
        wer_interval([1, 2], [0, 0])
    with pytest.raises(ScoringError, match="no reference words"):
        wer_interval([], [])


@pytest.mark.parametrize(("errors", "words"), [([1, 2], [1]), ([[1, 2]], [[1, 2]])])
def test_shapes_must_match(errors, words):
    with pytest.raises(ScoringError, match="same"):
        wer_interval(errors, words)
    with pytest.raises(ScoringError, match="same"):
        compare_systems([1], errors, words)


def test_much_better_system_is_significant():
    errors, words = utterances(400, 0.3)
    comparison = compare_systems(errors, errors // 2, words)
    assert comparison.better == "b"
    assert comparison.delta < 0
    assert comparison.low <= comparison.delta <= comparison.high < 0
    assert comparison.p_value < 1e-6
    assert comparison.probability_of_improvement == 1.0


@given(seed=st.integers(0, 1000), count=st.integers(1, 80))
@settings(max_examples=60)
def test_swapping_the_systems_swaps_the_result(seed, count):
    (a, words), (b, _) = utterances(count, 0.2, seed), utterances(count, 0.25, seed + 1)
    forth, back = compare_systems(a, b, words), compare_systems(b, a, words)
    assert back.delta == pytest.approx(-forth.delta)
    assert (back.low, back.high) == pytest.approx((-forth.high, -forth.low))
    assert back.p_value == pytest.approx(forth.p_value)
    assert back.probability_of_improvement == pytest.approx(1 - forth.probability_of_improvement)
    assert back.better == {"a": "b", "b": "a", None: None}[forth.better]


def test_same_system_does_not_differ():
    errors, words = utterances(100, 0.2)
    comparison = compare_systems(errors, errors, words)
    assert (comparison.delta, comparison.low, comparison.high, comparison.p_value, comparison.better) == (
        0,
        0,
        0,
        1.0,
        None,
    )
    assert comparison.probability_of_improvement == 0.5


def test_paired_test_is_more_sensitive_than_separate_intervals():
    errors, words = utterances(400, 0.3)
    better = errors - (np.arange(400) % 10 == 0) * (errors > 0)
    low, _ = wer_interval(errors, words)
    _, high = wer_interval(better, words)
    assert low < high
    assert compare_systems(errors, better, words).better == "b"


def test_p_value_equals_one_computed_by_hand():
    # Differences 1, 1, 0, 0: mean 1/2, sample variance 1/3, so z = 0.5 / sqrt(1/12) = sqrt(3).
    assert matched_pair_p_value([0, 0, 0, 0], [1, 1, 0, 0]) == pytest.approx(0.08326451, abs=1e-7)
    # Differences 1, 2: mean 3/2, sample variance 1/2, so z = 1.5 / sqrt(1/4) = 3.
    assert matched_pair_p_value([0, 0], [1, 2]) == pytest.approx(0.00269980, abs=1e-7)


@pytest.mark.parametrize(("a", "b", "p_value"), [([2], [1], 1.0), ([2, 2], [1, 1], 0.5), ([3] * 9, [1] * 9, 2**-8)])
def test_constant_differences_have_exact_p_values(a, b, p_value):
    assert matched_pair_p_value(a, b) == pytest.approx(p_value)


def test_equal_systems_are_rarely_called_different():
    rng, calls = np.random.default_rng(3), 0
    words = np.full(150, 10)
    for trial in range(200):
        a, b = rng.binomial(words, 0.2), rng.binomial(words, 0.2)
        calls += compare_systems(a, b, words, samples=200, seed=trial).better is not None
    assert calls <= 20


def differing(differences, words):
    """The comparison of a system with one that has so many errors more in each utterance."""
    a = np.array([max(0, -difference) for difference in differences])
    return compare_systems(a, a + np.array(differences), np.full(len(a), words))


def test_system_is_better_only_if_test_and_interval_agree():
    # every resample is worse, but four utterances are too few for the test
    excluded = differing([1, 1, 1, 9], words=10)
    assert excluded.low > 0
    assert excluded.p_value > 0.1
    assert excluded.better is None
    # the test takes the mean for normal and rejects; rare large gains leave zero within the skewed interval
    for skewed in (differing([1] * 22 + [-4] * 2, words=40), differing([1] * 20 + [-6], words=10)):
        assert skewed.p_value < 0.05
        assert skewed.low <= 0 < skewed.high
        assert skewed.better is None
    agreed = differing([1] * 22 + [-1] * 2, words=40)
    assert agreed.p_value < 0.05
    assert agreed.low > 0
    assert agreed.better == "a"
    assert differing([-1] * 22 + [1] * 2, words=40).better == "b"


def test_comparison_is_a_json_value():
    errors, words = utterances(30, 0.2)
    value = json.loads(json.dumps(compare_systems(errors, errors + 1, words).to_dict()))
    assert value["better"] == "a"
    assert set(value) == {"delta", "low", "high", "p_value", "better", "probability_of_improvement"}


def test_resampling_speakers_gives_wider_intervals_for_speaker_errors():
    words = np.full(200, 10)
    speakers = [f"s{n % 10}" for n in range(200)]
    errors = np.array([5 if n % 10 < 5 else 0 for n in range(200)])
    by_utterance, by_speaker = wer_interval(errors, words), wer_interval(errors, words, speakers=speakers)
    assert by_speaker[0] < by_utterance[0] < 0.25 < by_utterance[1] < by_speaker[1]
    # ten speakers at rates of 0 or 0.5: the rate of a resample has a standard deviation of 0.25 / sqrt(10)
    assert by_speaker[1] - by_speaker[0] == pytest.approx(2 * 1.96 * 0.25 / math.sqrt(10), rel=0.2)


def test_one_utterance_per_speaker_equals_resampling_utterances():
    errors, words = utterances(30, 0.3)
    speakers = [f"s{n:02}" for n in range(30)]
    assert wer_interval(errors, words, speakers=speakers) == wer_interval(errors, words)
    with pytest.raises(ScoringError, match="29 speakers for 30 utterances"):
        wer_interval(errors, words, speakers=speakers[1:])
