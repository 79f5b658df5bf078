"""Pronunciation and silence probabilities from alignments."""

import numpy as np
import pytest

from speech.hmm.pronunciations import PronunciationCounts, count_pronunciations, graph_options
from speech.hmm.topology import NOISE, PhoneSet
from speech.hmm.viterbi import StatePath

LEXICON = {"AT": [("AE1", "T"), ("AH0", "T")], "TO": [("T", "AH0")]}


def spoken(phones, *words):
    """An alignment of some pronunciations; None is a pause."""
    names, places, number = [], [], 0
    for word in words:
        numbers = (phones.silence,) if word is None else phones.numbers(word)
        names += numbers
        places += [-1 if word is None else number] * len(numbers)
        number += word is not None
    sizes = np.arange(len(names) + 1, dtype=np.int32)
    return StatePath(np.array(names, np.int16), np.array(places, np.int16), sizes, np.zeros(len(names), np.int8))


@pytest.mark.parametrize("positions", [False, True])
def test_counts_equal_those_of_the_alignments(positions):
    phones = PhoneSet.of([spoken for several in LEXICON.values() for spoken in several], positions)
    counts = count_pronunciations(
        {
            "a": spoken(phones, None, ("AE1", "T"), ("T", "AH0"), None),
            "b": spoken(phones, ("AE1", "T"), ("AH0", "T"), ("AE1", "T")),
            "c": spoken(phones, None, (NOISE,)),
        },
        {"a": ["AT", "TO"], "b": ["AT", "AT", "AT"], "c": ["XYZZY"]},
        phones,
    )
    assert counts.spoken["AT", ("AE1", "T")] == 3
    assert counts.spoken["AT", ("AH0", "T")] == 1
    assert (counts.pauses, counts.places) == (3, 9)
    options = graph_options(counts + PronunciationCounts(), LEXICON, smoothing=1.0)
    assert options.pronunciations == {("AT", ("AH0", "T")): 0.5}  # (1 + 1) / (3 + 1)
    assert options.silence_probability == pytest.approx(4 / 11)


def test_unseen_words_keep_equal_pronunciation_probabilities():
    assert graph_options(PronunciationCounts(), LEXICON).pronunciations == {}


def test_silence_may_depend_on_the_word_before_it():
    phones = PhoneSet.of([spoken for several in LEXICON.values() for spoken in several])
    at, to = ("AE1", "T"), ("T", "AH0")
    counts = count_pronunciations(
        {"a": spoken(phones, None, at, None, to, at, None), "b": spoken(phones, to, to)},
        {"a": ["AT", "TO", "AT"], "b": ["TO", "TO"]},
        phones,
    )
    assert counts.paused == {"AT": 2}
    options = graph_options(counts + PronunciationCounts(), LEXICON, smoothing=0.5, by_word=True)
    silence = options.silence_probability
    assert silence == pytest.approx(3.5 / 8)
    assert options.silence_after == {"AT": pytest.approx((2 + silence) / 3), "TO": pytest.approx(silence / 4)}
    assert options.pause_costs("AT")[0] < options.pause_costs(None)[0] < options.pause_costs("TO")[0]
    assert options.pause_costs("XYZZY") == options.pause_costs(None)
    assert graph_options(counts, LEXICON).silence_after is None
