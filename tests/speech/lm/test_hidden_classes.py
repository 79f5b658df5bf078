"""The hidden Markov language model against sums over all sequences of classes."""

import itertools

import numpy as np
import pytest

from speech.lm import HiddenClassConfig, LmError, Sources, Vocabulary, estimate, load
from speech.lm.hidden_classes import HiddenClasses, HiddenClassModel, _batches, _expected, estimated
from speech.lm.vocabulary import END_ID, SPECIAL

WORDS = 3 + len(SPECIAL)


def drawn(classes=2, seed=0):
    """Random parameters."""
    chosen = np.random.default_rng(seed)
    words = chosen.uniform(0.1, 1, (classes, WORDS))
    words[:, 1:3] = 0
    parts = chosen.uniform(0.1, 1, classes + 1), chosen.uniform(0.1, 1, (classes, classes + 1)), words
    return HiddenClasses(*(table / table.sum(axis=-1, keepdims=True) for table in parts))


def paths(model, sentence):
    """Each sequence of classes with its joint probability with the sentence."""
    size = len(model.words)
    if not len(sentence):
        return {(): model.first[-1]}
    probabilities = {}
    for classes in itertools.product(range(size), repeat=len(sentence)):
        prob = model.first[classes[0]] * model.following[classes[-1], -1]
        for before, after in itertools.pairwise(classes):
            prob *= model.following[before, after]
        probabilities[classes] = prob * np.prod(
            [model.words[at, word] for at, word in zip(classes, sentence, strict=True)]
        )
    return probabilities


def expected(model, sentences):
    """Expected counts and log likelihood from the definition."""
    counts, likelihood = HiddenClasses(*(np.zeros_like(table) for table in vars(model).values())), 0.0
    for sentence in sentences:
        by_path = paths(model, sentence)
        total = sum(by_path.values())
        likelihood += np.log(total)
        for classes, prob in by_path.items():
            share = prob / total
            counts.first[classes[0] if classes else -1] += share
            for at, word in zip(classes, sentence, strict=True):
                counts.words[at, word] += share
            for before, after in itertools.pairwise(classes):
                counts.following[before, after] += share
            if classes:
                counts.following[classes[-1], -1] += share
    return counts, likelihood


SENTENCES = [
    np.array(numbers, dtype=np.int64) for numbers in ([], [3], [3, 4, 5, 0], [5, 5], [4, 3, 4], [0], [5, 4, 3, 3, 5])
]


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_expected_counts_equal_sums_over_all_paths(classes):
    model = drawn(classes)
    counts, likelihood = _expected(model, list(_batches(SENTENCES)))
    wanted, total = expected(model, SENTENCES)
    assert likelihood == pytest.approx(total)
    for name in vars(wanted):
        np.testing.assert_allclose(getattr(counts, name), getattr(wanted, name), atol=1e-12, err_msg=name)


def test_sentence_probability_is_the_sum_over_all_paths():
    model = drawn()
    asked = HiddenClassModel(Vocabulary(["a", "b", "c"]), model)
    for sentence in SENTENCES:
        state, total = asked.start, 0.0
        for word in [*sentence.tolist(), END_ID]:
            state, log_prob = asked.score(state, word)
            total += log_prob
        assert total == pytest.approx(np.log10(sum(paths(model, sentence).values())))


def test_no_iteration_lowers_the_likelihood():
    chosen = np.random.default_rng(5)
    sentences = [chosen.integers(3, WORDS, chosen.integers(0, 9)) for _ in range(60)]
    _, likelihoods = estimated(sentences, WORDS, HiddenClassConfig(classes=3, iterations=25))
    assert len(likelihoods) == 25
    assert np.diff(likelihoods).min() > -1e-8
    assert likelihoods[-1] > likelihoods[0] + 1


def test_alternating_classes_are_found():
    """After a or b, c always follows: one class is a unigram model, two classes can predict the next word."""
    lines = [
        " ".join(f"{first} c" for first in chosen) for chosen in ("ab", "ba", "aa", "bb", "abab", "baba", "a", "b")
    ]
    perplexities = {}
    for classes in (1, 2):
        cfg = HiddenClassConfig(classes=classes, iterations=60, pseudo_count=0.1)
        model, _ = estimated(
            [np.array([{"a": 3, "b": 4, "c": 5}[word] for word in line.split()]) for line in lines * 5], WORDS, cfg
        )
        asked = HiddenClassModel(Vocabulary(["a", "b", "c"]), model)
        perplexities[classes] = asked.evaluate(line.split() for line in lines).with_unknown
    assert perplexities[2] < 0.75 * perplexities[1]


def test_very_long_sentences_do_not_underflow():
    sentence = np.tile([3, 4, 5], 700)
    model, likelihoods = estimated([sentence, sentence[:2]], WORDS, HiddenClassConfig(classes=2, iterations=3))
    assert np.isfinite(likelihoods).all()
    assert all(np.isfinite(table).all() for table in vars(model).values())


def test_damaged_file_is_an_error_with_a_remedy(tmp_path):
    cfg = HiddenClassConfig(classes=2, iterations=1)
    estimate(Sources(transcripts=["one two", "two"]), cfg, tmp_path)
    for content in (b"", (tmp_path / "hmm.safetensors").read_bytes()[:-9]):
        (tmp_path / "hmm.safetensors").write_bytes(content)
        with pytest.raises(LmError, match=r"hmm\.safetensors: the classes cannot be read.* estimate the model again"):
            load(cfg, tmp_path)
