"""Entropy pruning removes the n-grams that Stolcke's criterion selects, and the model still sums to one."""

import math

import numpy as np
import pytest

from speech.lm import entropy_pruned, read_arpa, write_arpa
from speech.lm.pruning import _level, history_log_probs, relative_rises

FALLBACK = (0.5, 1.0, 1.5)


def distribution(model, state):
    words = np.array([word for word in range(len(model.words)) if word != 1])
    return dict(zip(words.tolist(), 10 ** model.score_batch(np.full(len(words), state), words)[1], strict=True))


def direct_rise(model, order, place):
    """exp(D) - 1, with D summed over all words of the context with and without the n-gram."""
    first, _ = model.tables.bounds(order)
    state, word = (int(number) for number in divmod(int(model.tables.keys[first + place]), len(model.words)))
    before, shorter = distribution(model, state), distribution(model, int(model.tables.links[state - 1]))
    states, words = np.divmod(model.tables.keys, len(model.words))
    explicit = set(words[states == state].tolist()) - {word}
    weight = (1 - sum(before[follower] for follower in explicit)) / (
        1 - sum(shorter[follower] for follower in explicit)
    )
    after = {follower: before[follower] if follower in explicit else weight * shorter[follower] for follower in before}
    assert sum(after.values()) == pytest.approx(1, abs=1e-5)
    divergence = sum(p * (math.log(p) - math.log(after[follower])) for follower, p in before.items())
    return math.exp(10 ** history_log_probs(model)[state] * divergence) - 1


@pytest.mark.parametrize("order", [2, 3])
def test_criterion_equals_the_divergence_over_all_words(make, sentences, order):
    model = make(sentences, 3, fallback=FALLBACK)
    rises = relative_rises(_level(model, order, history_log_probs(model)))
    for place in range(0, len(rises), max(1, len(rises) // 40)):
        assert rises[place] == pytest.approx(direct_rise(model, order, place), rel=0.02, abs=2e-8)


def test_history_probability_is_the_product_over_its_words(make, sentences):
    model = make(sentences, 3, fallback=FALLBACK)
    history = history_log_probs(model)
    end = float(model.tables.log_probs[2])
    w1, w8 = model.words.index("w1"), model.words.index("w8")
    state = model.context([w1, w8])
    assert model.ngrams(2)[state - 1 - len(model.words)].tolist() == [w1, w8]
    assert history[state] == pytest.approx(model.score(0, w1)[1] + model.score(w1 + 1, w8)[1])
    assert history[model.context([1])] == pytest.approx(end)


@pytest.mark.parametrize("threshold", [1e-5, 1e-4, 1e-3, 0.5])
def test_pruned_model_sums_to_one_and_keeps_its_probabilities(make, sentences, threshold, tmp_path):
    model = make(sentences, 4, fallback=FALLBACK)
    pruned = entropy_pruned(model, threshold)
    assert sum(pruned.tables.counts) < sum(model.tables.counts)
    for state in range(0, pruned.num_states, 5):
        if state != 3:  # nothing follows </s>
            assert sum(distribution(pruned, state).values()) == pytest.approx(1, abs=1e-4)
    for order in range(1, pruned.order + 1):
        before = {tuple(gram) for gram in model.ngrams(order).tolist()}
        assert {tuple(gram) for gram in pruned.ngrams(order).tolist()} <= before
    write_arpa(pruned, tmp_path / "pruned.arpa")  # reading it checks that every context is there
    assert read_arpa(tmp_path / "pruned.arpa").tables.counts == pruned.tables.counts


def test_only_n_grams_below_the_threshold_are_pruned(make, sentences):
    model = make(sentences, 2, fallback=FALLBACK)
    rises = relative_rises(_level(model, 2, history_log_probs(model)))
    threshold = float(np.median(rises))
    assert entropy_pruned(model, threshold).tables.counts[1] == np.count_nonzero(rises >= threshold)


def test_threshold_of_zero_keeps_the_model(make, sentences):
    model = make(sentences, 3, fallback=FALLBACK)
    same = entropy_pruned(model, -1.0)
    assert same.tables.counts == model.tables.counts
    np.testing.assert_array_equal(same.tables.keys, model.tables.keys)
    held_out = sentences[:50]
    assert same.evaluate(held_out).with_unknown == pytest.approx(model.evaluate(held_out).with_unknown, rel=1e-4)
