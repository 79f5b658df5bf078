"""Mixtures of models are sums of probabilities, with the weights that minimize perplexity on held-out text."""

import numpy as np
import pytest

from speech.lm import LmError, Mixture, merged_ngrams, read_arpa, tuned_weights, write_arpa

FALLBACK = (0.5, 1.0, 1.5)


@pytest.fixture
def models(make, sentences):
    """Two models with vocabularies that overlap."""
    other = [[word.replace("w1", "v") for word in sentence[::-1]] for sentence in sentences[100:]]
    return [make(sentences[:200], 3, fallback=FALLBACK), make(other, 2, "witten-bell")]


def test_mixture_is_the_weighted_sum_of_probabilities(models):
    mixture = Mixture(models, [0.3, 0.7])
    for sentence in (["w2", "w3", "w2"], ["w2", "unheard", "w4"], []):
        expected = 0.3 * 10 ** np.array(models[0].sentence(sentence)) + 0.7 * 10 ** np.array(
            models[1].sentence(sentence)
        )
        np.testing.assert_allclose(10 ** np.array(mixture.sentence(sentence)), expected, rtol=1e-6)


def test_mixture_sums_to_one_over_words_of_both_models(models):
    mixture = Mixture(models, [0.4, 0.6])
    assert {"w1", "v"} <= set(mixture.words)
    words = np.array([word for word in range(len(mixture.words)) if word != 1])
    for history in ([], ["w2"], ["w1", "v0"], ["v", "w3"]):
        state = mixture.start
        for word in history:
            state, _ = mixture.score(state, mixture.words.index(word))
        assert hash(state) is not None
        _, log_probs = mixture.score_batch([state] * len(words), words)
        assert (10**log_probs).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.6], [1.5, -0.5]])
def test_wrong_number_of_weights_is_refused(models, weights):
    with pytest.raises(LmError, match="as many weights"):
        Mixture(models, weights)


def test_tuned_weights_give_the_lowest_perplexity_on_held_out_text(make, sentences):
    models = [make(sentences[:150], 3, fallback=FALLBACK), make(sentences[:150], 1, "witten-bell")]
    held_out = sentences[150:]
    weights = tuned_weights(models, held_out)
    assert sum(weights) == pytest.approx(1)

    def perplexity(first):
        return Mixture(models, [first, 1 - first]).evaluate(held_out).with_unknown

    best = min(np.linspace(0, 1, 41), key=perplexity)
    assert weights[0] == pytest.approx(best, abs=0.03)
    assert perplexity(weights[0]) <= perplexity(best) * (1 + 1e-5)


def test_tuning_without_held_out_text_is_refused(models):
    with pytest.raises(LmError, match="held-out"):
        tuned_weights(models, [])


def test_merged_n_grams_have_mixture_probabilities_and_sum_to_one(models, tmp_path):
    mixture, merged = Mixture(models, [0.3, 0.7]), merged_ngrams(models, [0.3, 0.7])
    assert set(merged.words) == set(mixture.words)
    assert merged.order == 3
    grams = merged.ngrams(3)
    for gram in grams[:: len(grams) // 50].tolist():
        words = [merged.words[number] for number in gram]
        if words[0] == "<s>":  # a mixture starts there by itself
            state = mixture.start
            for word in words[1:]:
                state, log_prob = mixture.score(state, mixture.words.index(word))
            assert merged.score(merged.context(gram[:-1]), gram[-1])[1] == pytest.approx(log_prob, abs=1e-5)
    words = np.array([word for word in range(len(merged.words)) if word != 1])
    for state in range(0, merged.num_states, 7):
        if state != 3:
            assert (10 ** merged.score_batch(np.full(len(words), state), words)[1]).sum() == pytest.approx(1, abs=1e-4)
    write_arpa(merged, tmp_path / "merged.arpa")
    assert read_arpa(tmp_path / "merged.arpa").tables.counts == merged.tables.counts


def test_merging_a_model_with_itself_changes_nothing(make, sentences):
    model = make(sentences, 3, fallback=FALLBACK)
    merged = merged_ngrams([model, model], [0.5, 0.5])
    np.testing.assert_array_equal(merged.tables.keys, model.tables.keys)
    np.testing.assert_allclose(merged.tables.log_probs, model.tables.log_probs, atol=1e-5)
    assert merged.evaluate(sentences[:40]).with_unknown == pytest.approx(
        model.evaluate(sentences[:40]).with_unknown, rel=1e-3
    )
