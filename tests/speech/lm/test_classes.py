"""Classes of words: the exchange algorithm raises the likelihood, and the class model sums to one."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from speech.lm import ClassConfig, ClassEstimator, LmError, Text, TextConfig
from speech.lm.classes import Clustering, exchanged
from speech.lm.counting import count_ngrams
from speech.lm.encoding import encode_lines

LINES = ["a x", "b x", "a y", "b y", "a x b y", "b y a", "c x", "x a", "y b y", "a x a y"]


def counted(lines, folder):
    text = encode_lines(lines, folder)
    return text.words, *count_ngrams(text, 2, folder)


def direct_likelihood(lines, words, classes):
    """Of the text under p(class | class before) p(word | class), with relative frequencies."""
    pairs, heads, tails, counts = Counter(), Counter(), Counter(), Counter()
    for line in lines:
        sentence = ["<s>", *line.split(), "</s>"]
        for previous, two in itertools.pairwise(sentence):
            first, second = (int(classes[words.index(word)]) for word in (previous, two))
            pairs[first, second] += 1
            heads[first] += 1
            tails[second] += 1
            counts[two] += 1
    total = sum(n * math.log(n / heads[first]) for (first, _), n in pairs.items())
    return total + sum(n * math.log(n / tails[int(classes[words.index(word)])]) for word, n in counts.items())


def test_likelihood_rises_and_equals_that_of_the_text(tmp_path):
    words, unigrams, bigrams = counted(LINES, tmp_path)
    classes, likelihoods = exchanged(unigrams, bigrams, 2, 10)
    assert likelihoods == sorted(likelihoods)
    assert likelihoods[-1] > likelihoods[0]
    assert likelihoods[-1] == pytest.approx(direct_likelihood(LINES, words, classes))
    assert {frozenset(words[i] for i in np.flatnonzero(classes == c)) for c in (3, 4)} == {
        frozenset("abc"),
        frozenset("xy"),
    }


def test_gains_equal_the_change_of_the_likelihood(tmp_path):
    lines = [*LINES, "a a x x", "y y y"]
    words, unigrams, bigrams = counted(lines, tmp_path)
    start = np.array([0, 1, 2, *[3 + at % 3 for at in range(len(words) - 3)]])
    for word in range(3, len(words)):
        likelihoods = []
        for target in (3, 4, 5):
            moved = start.copy()
            moved[word] = target
            likelihoods.append(Clustering(unigrams, bigrams, moved, 6).log_likelihood())
            assert likelihoods[-1] == pytest.approx(direct_likelihood(lines, words, moved))
        clustering = Clustering(unigrams, bigrams, start, 6)
        clustering.improve(word)
        assert clustering.log_likelihood() == pytest.approx(max(likelihoods))
        fresh = Clustering(unigrams, bigrams, clustering.classes, 6)
        np.testing.assert_array_equal(clustering.pairs, fresh.pairs)


def test_class_model_sums_to_one_and_is_read_back(tmp_path, sentences):
    lines = [" ".join(sentence) for sentence in sentences]
    estimator = ClassEstimator(ClassConfig(classes=6, order=3))
    model, facts = estimator.estimate(Text(TextConfig(), transcripts=lines), tmp_path)
    assert facts["classes"] == 6
    again = estimator.load(tmp_path)
    words = np.array([word for word in range(len(model.words)) if word != 1])
    for history in ([], ["w1"], ["w3", "w7"], ["unheard"]):
        state = model.start
        for word in history:
            state, _ = model.score(state, model.words.index(word))
        assert (10 ** model.score_batch([state] * len(words), words)[1]).sum() == pytest.approx(1, abs=1e-5)
        assert again.sentence(history) == pytest.approx(model.sentence(history), abs=1e-6)


def test_damaged_class_files_are_named(tmp_path, sentences):
    estimator = ClassEstimator(ClassConfig(classes=3))
    estimator.estimate(Text(TextConfig(), transcripts=[" ".join(s) for s in sentences]), tmp_path)
    (tmp_path / "classes.tsv").write_text("w1\t3\n")
    with pytest.raises(LmError, match=r"classes\.tsv"):
        estimator.load(tmp_path)
