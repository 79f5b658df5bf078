"""Alignment and counts: sclite's rule against independent implementations, known examples, and sums over sets."""

import itertools
import json

import jiwer
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from speech.scoring import (
    ErrorCounts,
    ScoringError,
    ScoringRow,
    align,
    count_operations,
    score_sets,
    score_utterance,
)

OPERATIONS = ("cor", "sub", "ins", "del")
COSTS = {"cor": 0, "sub": 4, "ins": 3, "del": 3}


def sentences(symbols, most, least=0):
    return st.lists(st.sampled_from(symbols), min_size=least, max_size=most)


def pairs(most=12, least=4):
    """Pairs of sentences; few different words make many ties. One of them may be short, or both long."""
    return st.sampled_from(["ab", "abc", "abcdefgh"]).flatmap(
        lambda symbols: st.tuples(sentences(symbols, most), sentences(symbols, most, least)).flatmap(st.permutations)
    )


def counted(steps):
    operations = [operation for operation, _, _ in steps]
    return tuple(operations.count(operation) for operation in OPERATIONS)


def cheapest(ref, hyp):
    """The least cost of any alignment, by recursion over every alignment of two short sentences."""
    if not ref or not hyp:
        return 3 * (len(ref) + len(hyp))
    return min(
        cheapest(ref[1:], hyp[1:]) + (0 if ref[0] == hyp[0] else 4),
        cheapest(ref[1:], hyp) + 3,
        cheapest(ref, hyp[1:]) + 3,
    )


def aligned_by_full_table(ref, hyp):
    """The rule once more, written from the end of the sentences with a plain table and no shortcut."""
    cost = np.zeros((len(ref) + 1, len(hyp) + 1), dtype=int)
    cost[:, 0], cost[0, :] = 3 * np.arange(len(ref) + 1), 3 * np.arange(len(hyp) + 1)
    for i, j in itertools.product(range(1, len(ref) + 1), range(1, len(hyp) + 1)):
        diagonal = cost[i - 1, j - 1] + 4 * (ref[i - 1] != hyp[j - 1])
        cost[i, j] = min(diagonal, cost[i - 1, j] + 3, cost[i, j - 1] + 3)
    i, j, steps = len(ref), len(hyp), []
    while i or j:
        if i and j and cost[i, j] == cost[i - 1, j - 1] + 4 * (ref[i - 1] != hyp[j - 1]):
            i, j = i - 1, j - 1
            steps.append(("cor" if ref[i] == hyp[j] else "sub", ref[i], hyp[j]))
        elif i and (j == 0 or cost[i - 1, j] < cost[i, j - 1]):
            i -= 1
            steps.append(("del", ref[i], None))
        else:
            j -= 1
            steps.append(("ins", None, hyp[j]))
    return steps[::-1]


@given(pairs(least=6))
@settings(max_examples=100)
def test_alignment_contains_both_sentences(pair):
    ref, hyp = pair
    steps = align(ref, hyp)
    assert [word for _, word, _ in steps if word is not None] == ref
    assert [word for _, _, word in steps if word is not None] == hyp
    for operation, a, b in steps:
        assert {"cor": a == b, "sub": None not in (a, b) and a != b, "ins": a is None, "del": b is None}[operation]


@given(pairs(most=6))
@settings(max_examples=150)
def test_alignment_has_the_least_cost(pair):
    ref, hyp = pair
    assert sum(COSTS[operation] for operation, _, _ in align(ref, hyp)) == cheapest(ref, hyp)


@given(pairs(most=25, least=10))
@settings(max_examples=150)
@example((list("aa"), list("a")))
@example((list("abc"), list("cab")))
def test_ties_and_shortcuts_agree_with_the_full_table(pair):
    ref, hyp = pair
    steps = align(ref, hyp)
    assert steps == aligned_by_full_table(ref, hyp)
    assert count_operations(ref, hyp) == counted(steps)


def test_all_pairs_of_short_sentences_agree_with_the_full_table():
    sentences = [list(s) for length in range(5) for s in itertools.product("ab", repeat=length)]
    for ref, hyp in itertools.product(sentences, sentences):
        assert count_operations(ref, hyp) == counted(aligned_by_full_table(ref, hyp))


@given(pairs(most=20, least=8))
@settings(max_examples=100)
def test_total_errors_agree_with_the_edit_distance(pair):
    ref, hyp = pair
    _, sub, ins, dele = count_operations(ref, hyp)
    least = Levenshtein.distance(ref, hyp)
    # Dearer substitutions allow some more errors than the edit distance has, as in sclite, but never fewer.
    assert least <= sub + ins + dele <= 4 / 3 * least
    assert ins - dele == len(hyp) - len(ref)


# Counted with sclite (Debian's sctk 2.4.10): (reference, hypothesis, correct, substituted, inserted, deleted).
KNOWN = [
    ("the cat sat on the mat", "the cat sat on the mat", 6, 0, 0, 0),
    ("the cat sat on the mat", "the hat sat on mat", 4, 1, 0, 1),
    ("a", "", 0, 0, 0, 1),
    ("", "a b", 0, 0, 2, 0),
    ("", "", 0, 0, 0, 0),
    ("a a", "a", 1, 0, 0, 1),
    ("a b", "b a", 1, 0, 1, 1),
    ("a b c", "c a b", 2, 0, 1, 1),
    ("a b c", "x y z", 0, 3, 0, 0),
    ("a b c d", "x a b c", 3, 0, 1, 1),
    ("a b c d e", "b x y z a", 1, 3, 1, 1),
    ("b a a a", "a a b a b", 3, 0, 2, 1),
    ("a b b a", "b a a b", 2, 1, 1, 1),
    ("a b c x y", "d e f g a", 0, 5, 0, 0),
    ("a cat", "a hat now", 1, 1, 1, 0),
    ("x a b y", "a p q b", 2, 0, 2, 2),
    ("a b c", "c d a", 0, 3, 0, 0),
    ("a b c d", "d x y a", 0, 4, 0, 0),
    ("a b c d e f", "c d x y z a", 2, 2, 2, 2),
]


@pytest.mark.parametrize(("ref", "hyp", "cor", "sub", "ins", "dele"), KNOWN)
def test_known_counts_of_sclite_are_reproduced(ref, hyp, cor, sub, ins, dele):
    counts = score_utterance(ref, hyp)
    assert (counts.cor, counts.sub, counts.ins, counts.dele) == (cor, sub, ins, dele)


def test_deletions_at_the_start_are_counted():
    assert align(["a", "a"], ["a"]) == [("del", "a", None), ("cor", "a", "a")]
    assert align(["a"], ["a", "a"]) == [("ins", None, "a"), ("cor", "a", "a")]


def test_long_sentences_are_aligned():
    rng = np.random.default_rng(0)
    ref, hyp = (rng.choice(list("abcdefgh"), size=400).tolist() for _ in range(2))
    assert count_operations(ref, hyp) == counted(align(ref, hyp))


ROWS = [
    ("u1", "the cat sat", "the hat sat", "ann", "read"),
    ("u2", "on the mat", "on mat", "bob", "read"),
    ("u3", "", "oh", "ann", "phone"),
    ("u4", "one two three four", "one two three four", "bob", "phone"),
]


def test_rate_of_a_set_is_not_the_mean_of_rates():
    report = score_sets([("1", "a", "b", "s", "d"), ("2", "a b c d e f g h i", "a b c d e f g h i", "s", "d")])
    assert report.wer == pytest.approx(1 / 10)


def test_counts_are_summed_by_set_speaker_and_domain():
    report = score_sets(ROWS)
    assert report.wer == pytest.approx(3 / 10)
    assert list(report.speakers) == ["ann", "bob"]
    assert report.speakers["ann"].wer == pytest.approx(2 / 3)
    assert report.speakers["bob"].wer == pytest.approx(1 / 7)
    assert report.domains["phone"].errors == 1
    assert sum(report.speakers.values(), ErrorCounts()) == report.total
    assert sum(report.domains.values(), ErrorCounts()) == report.total
    assert sum((utterance.counts for utterance in report.utterances), ErrorCounts()) == report.total
    assert [utterance.id for utterance in report.utterances] == ["u1", "u2", "u3", "u4"]
    assert report.errors().tolist() == [1, 1, 1, 0]
    assert report.words().tolist() == [3, 3, 0, 4]
    assert report.total.ser == pytest.approx(3 / 4)


def test_empty_references_are_scored():
    report = score_sets([("u3", "", "oh dear", "ann", "phone")])
    assert report.wer is None
    assert report.cer is None
    assert report.total.ins == 2
    assert score_sets([]).total.ser is None


def test_characters_include_single_spaces():
    counts = score_utterance("a  bc\td", "abc d")
    assert counts.ref_chars == len("a bc d")
    assert counts.char_errors == 1
    assert counts.cer == pytest.approx(1 / 6)


@given(
    st.lists(
        st.tuples(sentences(["a", "bb", "c"], 6).filter(bool), sentences(["a", "bb", "c"], 6)), min_size=1, max_size=6
    )
)
@settings(max_examples=60)
def test_character_error_rate_equals_jiwers(texts):
    refs, hyps = [" ".join(ref) for ref, _ in texts], [" ".join(hyp) for _, hyp in texts]
    report = score_sets((str(i), ref, hyp, "", "") for i, (ref, hyp) in enumerate(zip(refs, hyps, strict=True)))
    assert report.cer == pytest.approx(jiwer.cer(refs, hyps))
    assert report.wer >= jiwer.wer(refs, hyps) - 1e-12


def test_duplicate_utterance_is_refused():
    with pytest.raises(ScoringError, match="'u1'"):
        score_sets([*ROWS, ROWS[0]])


def test_named_rows_are_scored():
    assert score_sets([ScoringRow("u1", "a b", "a")]).wer == 0.5


def test_report_is_a_json_value():
    value = json.loads(json.dumps(score_sets(ROWS).to_dict(utterances=True)))
    assert value["total"]["wer"] == pytest.approx(0.3)
    assert value["total"]["del"] == 1
    assert value["speakers"]["ann"]["errors"] == 2
    assert value["utterances"][2] == value["utterances"][2] | {"id": "u3", "ref": "", "hyp": "oh", "wer": None}
    assert "utterances" not in score_sets(ROWS).to_dict()
