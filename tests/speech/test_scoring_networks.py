"""Alternatives, optional words and fragments: known cases counted with sclite, and all readings by brute force."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nist_tools import marked_text

from speech.scoring import (
    MarkupError,
    ScoringError,
    ScoringRules,
    align,
    align_texts,
    mark,
    score_sets,
    score_utterance,
)
from speech.scoring.network import parse_network

ALL = ScoringRules(alternatives=True, optional=True, fragments=True, ignore_case=True)

# Counted with sclite -D -F (Debian's sctk 2.4.10): (reference, hypothesis, correct, substituted, inserted, deleted).
KNOWN = [
    ("a { b / c } d", "a c d", 3, 0, 0, 0),
    ("a { b / @ } d", "a d", 2, 0, 0, 0),
    ("a { b / @ } d", "a b d", 3, 0, 0, 0),
    ("a { b / @ } d", "a x d", 2, 0, 1, 0),
    ("a { @ / b } d", "a", 1, 0, 0, 1),
    ("a { b c / e } d", "a x y d", 2, 1, 1, 0),
    ("a { b c / e } d", "a d", 2, 0, 0, 1),
    ("a { b / c { e / f } g } d", "a c f g d", 5, 0, 0, 0),
    ("{ a / @ }", "", 0, 0, 0, 0),
    ("{ a / b c }", "b", 1, 0, 0, 1),
    ("a {b/c} d", "a c d", 3, 0, 0, 0),
    ("a", "{ c / b }", 0, 1, 0, 0),
    ("a { b / c } d", "a { c / d } d", 3, 0, 0, 0),
    ("a b c b { c a / @ } b", "b b", 2, 0, 0, 3),
    ("@", "", 0, 0, 0, 0),
    # an optional word that is left out or inserted counts as correct
    ("a (b) d", "a d", 3, 0, 0, 0),
    ("a (b) d", "a b d", 3, 0, 0, 0),
    ("a (b) d", "a x d", 2, 1, 0, 0),
    ("a d", "a (b) d", 3, 0, 0, 0),
    ("a (b) c d", "a x d", 3, 1, 0, 0),
    ("{ (a) / @ }", "a", 1, 0, 0, 0),
    ("(a b) c", "c", 1, 0, 0, 2),
    ("ab-", "abc", 1, 0, 0, 0),
    ("abc", "ab-", 1, 0, 0, 0),
    ("-bc", "abc", 1, 0, 0, 0),
    ("ab-", "ac", 0, 1, 0, 0),
    ("a-", "ab-", 1, 0, 0, 0),
    ("ab-", "a-", 0, 1, 0, 0),
    ("-", "abc", 0, 1, 0, 0),
    ("-", "--", 1, 0, 0, 0),
    ("a-b", "axb", 0, 1, 0, 0),
    ("-ab-", "ab-", 1, 0, 0, 0),
    ("(ab-)", "abc", 1, 0, 0, 0),
    ("abc", "(-bc)", 0, 1, 0, 0),
    ("-bc", "(-bc)", 1, 0, 0, 0),
    ("(-bc)", "-c", 0, 1, 0, 0),
    ("-c", "(-bc)", 1, 0, 0, 0),
    ("A b", "a B", 2, 0, 0, 0),
    ("-low", "lower", 0, 1, 0, 0),
    ("cat", "cats", 0, 1, 0, 0),
    ("cat-", "scat", 0, 1, 0, 0),
]


@pytest.mark.parametrize(("ref", "hyp", "cor", "sub", "ins", "dele"), KNOWN)
def test_known_counts_of_sclite_are_reproduced(ref, hyp, cor, sub, ins, dele):
    counts = score_utterance(ref, hyp, ALL)
    assert (counts.cor, counts.sub, counts.ins, counts.dele) == (cor, sub, ins, dele)
    operations = [operation for operation, _, _ in align_texts(ref, hyp, ALL)]
    assert [operations.count(name) for name in ("cor", "sub", "ins", "del")] == [cor, sub, ins, dele]


def test_ties_are_broken_in_single_precision():
    # as sclite aligns it; exact costs would delete the first two words
    steps = align_texts("a b c b { c a / @ } b", "b b", ALL)
    assert [operation for operation, _, _ in steps] == ["del", "cor", "del", "cor", "del"]


def test_without_the_rules_marks_are_words():
    assert align_texts("a { b / c } (d)", "a c", ScoringRules()) == align(
        ["a", "{", "b", "/", "c", "}", "(d)"], ["a", "c"]
    )
    assert score_utterance("(b) ab-", "b abc", ScoringRules(alternatives=True)).sub == 2
    assert score_utterance("A", "a").errors == 1


def readings(items):
    """All word sequences of a text given as nested lists: a list of alternatives is a list of lists."""
    options = [
        [[item]] if isinstance(item, str) else [reading for alt in item for reading in readings(alt)] for item in items
    ]
    return [[word for part in choice for word in part if word != "@"] for choice in itertools.product(*options)]


def written(items):
    return " ".join(item if isinstance(item, str) else "{ " + " / ".join(map(written, item)) + " }" for item in items)


words = st.sampled_from("abc")
texts = st.recursive(
    st.lists(words, min_size=1, max_size=3),
    lambda inner: st.lists(words | st.lists(inner | st.just(["@"]), min_size=2, max_size=3), min_size=1, max_size=3),
    max_leaves=8,
)


@given(texts, st.lists(words, max_size=5))
@settings(max_examples=150)
def test_best_reading_is_aligned(items, hyp):
    rules = ScoringRules(alternatives=True)
    counts = score_utterance(written(items), " ".join(hyp), rules)
    costs = []
    for reading in readings(items):
        operations = [operation for operation, _, _ in align(reading, hyp)]
        costs.append(4 * operations.count("sub") + 3 * (operations.count("ins") + operations.count("del")))
    assert 4 * counts.sub + 3 * (counts.ins + counts.dele) == min(costs)
    assert counts.hyp_words == len(hyp)
    chosen = [ref for _, ref, _ in align_texts(written(items), " ".join(hyp), rules) if ref is not None]
    assert chosen in readings(items)


def test_arcs_are_in_topological_order():
    rng = random.Random(0)
    for _ in range(200):
        network = parse_network(marked_text(rng, list("abc")), ALL)
        for index, arc in enumerate(network.arcs):
            assert arc.before
            assert all(other < index for other in arc.before)
            assert all(other == -1 or network.arcs[other].end == arc.start for other in arc.before)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a { b / c", "'{' without '}'"),
        ("a b } c", "'}' without '{'"),
        ("a { b / } c", "write @ for no word"),
        ("a { } c", "is empty"),
    ],
)
def test_malformed_texts_are_refused(text, message):
    with pytest.raises(MarkupError, match=message):
        align_texts(text, "a", ALL)
    with pytest.raises(ScoringError, match=f"utterance 'u7': .*{message}"):
        score_sets([("u7", text, "a", "", "")], ALL)


def test_slashes_are_words_outside_braces():
    assert score_utterance("and/or / a", "and/or / a", ALL).cor == 3


def test_characters_are_those_of_the_chosen_reading():
    counts = score_utterance("{ hello / hi } (uh) wor-", "hi world", ALL)
    assert (counts.char_errors, counts.ref_chars) == (0, len("hi wor-"))
    assert mark(align_texts("{ hello / hi } (uh)", "hi you", ALL)) == "hi ((uh)->you)"
    assert mark(align_texts("hi", "hi (uh)", ALL)) == "hi (uh)"
    assert score_utterance("{ a / @ } hi", "ho", ALL).ref_chars == len("hi")  # @ has no characters


def test_labels_are_sums_over_their_utterances():
    rows = [("1", "a b", "a", "s", "", ("all", "sw")), ("2", "a", "b", "t", "", ("all", "ch"))]
    report = score_sets(rows)
    assert {name: counts.errors for name, counts in report.labels.items()} == {"all": 2, "sw": 1, "ch": 1}
    assert report.to_dict()["labels"]["sw"]["wer"] == 0.5
