"""Estimated n-gram models equal their definitions."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speech.lm.base import LmError
from speech.lm.counting import count_ngrams
from speech.lm.encoding import encode_lines
from speech.lm.estimation import smoothed
from speech.lm.vocabulary import START_ID

_spec = importlib.util.spec_from_file_location("lm_brute", Path(__file__).with_name("brute.py"))
brute = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(brute)

FALLBACK = (0.5, 1.0, 1.5)


def histories(sentences, order):
    """Contexts as they stand in the text, at most order - 1 words, and some that do not."""
    seen = {
        tuple(words[max(0, at - order + 1) : at]) for words in brute.padded(sentences) for at in range(1, len(words))
    }
    words = sorted({word for sentence in sentences for word in sentence})[:4]
    return seen | {(a, b)[: order - 1] for a, b in itertools.product(words, words)} | {()}


def assert_equal(model, reference, contexts):
    words = [word for word in model.words if word != "<s>"]
    assert set(words) == reference.words
    numbers = np.array([model.words.index(word) for word in words])
    for context in contexts:
        state = model.context([model.words.index(word) for word in context])
        _, log_probs = model.score_batch(np.full(len(words), state), numbers)
        known = tuple(word if word in model.words else "<unk>" for word in context)
        expected = [reference.prob(word, known) for word in words]
        # a weight of zero is stored as the logarithm -99
        np.testing.assert_allclose(10**log_probs, expected, rtol=2e-5, atol=1e-98, err_msg=str(context))
        assert sum(expected) == pytest.approx(1)
        assert (10**log_probs).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("method", ["kneser-ney", "witten-bell"])
def test_model_equals_its_definition_and_sums_to_one(make, sentences, order, method):
    model = make(sentences, order, method, fallback=FALLBACK)
    reference = brute.Brute(sentences, order, method, fallback=FALLBACK)
    assert_equal(model, reference, sorted(histories(sentences, order))[::7])
    assert model.tables.counts == (len(model.words), *(len(reference.raw[n]) for n in range(2, order + 1)))


@pytest.mark.parametrize("method", ["kneser-ney", "witten-bell"])
@pytest.mark.parametrize("cutoffs", [(0, 0, 1), (0, 1, 2), (2,), (1, 2)])
def test_cut_offs_give_their_probability_to_shorter_contexts(make, sentences, method, cutoffs):
    model = make(sentences, 3, method, cutoffs=cutoffs, fallback=FALLBACK)
    reference = brute.Brute(sentences, 3, method, cutoffs, fallback=FALLBACK)
    assert_equal(model, reference, sorted(histories(sentences, 3))[::5])
    assert model.tables.counts[1:] == tuple(len(reference.kept[n]) for n in (1, 2))


def test_limited_vocabulary_gives_probability_to_the_other_words(make, sentences):
    allowed = {f"w{number}" for number in range(0, 40, 2)}
    model = make(sentences, 3, allowed=allowed, fallback=FALLBACK)
    assert_equal(
        model, brute.Brute(sentences, 3, allowed=allowed, fallback=FALLBACK), sorted(histories(sentences, 3))[::5]
    )


text = st.lists(st.lists(st.sampled_from("abcd"), max_size=6), min_size=1, max_size=12)


@settings(max_examples=40)
@given(text, st.integers(1, 4), st.sampled_from(["kneser-ney", "witten-bell"]), st.sampled_from([(), (0, 1), (1,)]))
@example([[], ["d", "a"], ["a", "b", "a", "d", "c"], ["d", "a"], ["d", "a", "a", "c"]], 2, "kneser-ney", ())
def test_any_tiny_text_gives_the_model_of_the_definition(tmp_path_factory, sentences, order, method, cutoffs):
    cutoffs = cutoffs[:order]
    folder = tmp_path_factory.mktemp("tiny")
    encoded = encode_lines([" ".join(sentence) for sentence in sentences], folder, 3)
    counts = count_ngrams(encoded, order, folder)
    model, _ = smoothed(encoded.words, counts, method, folder, cutoffs=cutoffs, fallback=FALLBACK)
    assert_equal(model, brute.Brute(sentences, order, method, cutoffs, fallback=FALLBACK), histories(sentences, order))


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ([["a", "b"]], "no 1-gram has an adjusted count of"),
        ([["a"], ["b"], ["c"]] * 5, "no 1-gram has an adjusted count of 2"),
    ],
)
def test_discounts_that_cannot_be_estimated_name_the_remedies(make, sentences, message):
    with pytest.raises(LmError, match=message) as error:
        make(sentences, 2)
    assert "witten-bell" in str(error.value)
    assert "discount_fallback" in str(error.value)


def test_division_of_the_text_into_blocks_changes_no_bit(make, sentences, monkeypatch):
    whole = make(sentences, 4, fallback=FALLBACK)
    monkeypatch.setattr("speech.lm.counting._RANGE", 50)  # several ranges of keys, too
    monkeypatch.setattr("speech.lm.estimation._SLICE", 64)
    parts = make(sentences, 4, fallback=FALLBACK, block_lines=17)
    assert list(parts.words) == list(whole.words)
    for name in ("keys", "log_probs", "backoffs", "links"):
        np.testing.assert_array_equal(getattr(parts.tables, name), getattr(whole.tables, name))


def test_number_of_processes_changes_no_bit(make, sentences):
    alone = make(sentences, 3, fallback=FALLBACK)
    together = make(sentences, 3, fallback=FALLBACK, block_lines=200, workers=2)
    for name in ("keys", "log_probs", "backoffs", "links"):
        np.testing.assert_array_equal(getattr(together.tables, name), getattr(alone.tables, name))


def test_back_off_weights_normalize_the_left_over_probability(make, sentences):
    model = make(sentences, 3, fallback=FALLBACK)
    states, words = np.divmod(model.tables.keys, len(model.words))
    for state in range(1, model.num_states):
        seen = words[states == state]
        if not len(seen) or len(seen) > len(model.words) - 2:
            continue
        probs = 10.0 ** model.tables.log_probs[states == state].astype(float)
        shorter = np.full(len(seen), model.tables.links[state - 1])
        lower = 10.0 ** model.score_batch(shorter, seen)[1]
        if 1 - lower.sum() > 1e-3:
            expected = (1 - probs.sum()) / (1 - lower.sum())
            assert 10 ** model.backoff(state) == pytest.approx(expected, rel=1e-2)


def test_special_words_in_the_text_are_refused(tmp_path):
    for line in ("a <s> b", "</s>", "the <unk> one"):
        with pytest.raises(LmError, match="take them out"):
            encode_lines(["fine", line], tmp_path)


def test_scores_one_by_one_equal_scores_in_batches(make, sentences):
    model = make(sentences, 3, fallback=FALLBACK)
    for sentence in [*sentences[:20], ["w1", "unheard", "w2"], []]:
        state, scores = model.start, []
        for word in [*model.words.indices(sentence), 2]:
            state, log_prob = model.score(state, int(word))
            scores.append(log_prob)
        np.testing.assert_allclose(model.sentence(sentence), scores, rtol=1e-9)


def test_perplexity_counts_unknown_words_separately(make, sentences):
    model = make(sentences, 2, fallback=FALLBACK)
    perplexity = model.evaluate([["w1", "unheard"], ["w2"]])
    scores = [*model.sentence(["w1", "unheard"]), *model.sentence(["w2"])]
    assert (perplexity.sentences, perplexity.words, perplexity.unknown) == (2, 3, 1)
    assert perplexity.unknown_rate == pytest.approx(1 / 3)
    assert perplexity.with_unknown == pytest.approx(10 ** (-sum(scores) / 5))
    assert perplexity.without_unknown == pytest.approx(10 ** (-(sum(scores) - scores[1]) / 4))


def test_start_of_sentence_has_no_probability(make, sentences):
    model = make(sentences, 3, fallback=FALLBACK)
    first, last = model.tables.bounds(2)
    assert START_ID not in model.tables.keys[first:last] % len(model.words)
    assert model.tables.log_probs[START_ID] == 0
