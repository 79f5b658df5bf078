"""The matched-pairs sentence-segment test: segments by hand, and outcomes of NIST's sc_stats on the same errors."""

import json
import math

import numpy as np
import pytest

from speech.scoring import ScoringError, ScoringRules, matched_pairs, score_sets
from speech.scoring.mapsswe import error_segments

MARKS = ScoringRules(alternatives=True, optional=True)


def system(texts, rules=MARKS):
    """Scores of (reference, hypothesis) pairs."""
    return score_sets([(str(number), ref, hyp, "", "") for number, (ref, hyp) in enumerate(texts)], rules)


def segments(ref, a, b):
    return error_segments(*(system([(ref, hyp)]).utterances[0] for hyp in (a, b)))


@pytest.mark.parametrize(
    ("ref", "a", "b", "expected"),
    [
        ("a b c d e", "a b c d e", "a b c d e", []),
        ("a b c d e", "x b c d y", "a b c d e", [(1, 0), (1, 0)]),
        # one word that both have right does not end a segment, two do
        ("a b c", "x b c", "a b x", [(1, 1)]),
        ("a b c d", "x b c d", "a b c x", [(1, 0), (0, 1)]),
        # a word that one system has wrong is not right
        ("a b c d", "x b c d", "a x c d", [(1, 1)]),
        # an insertion between two words parts them
        ("a b c d", "x b y c d", "a b c d", [(2, 0)]),
        ("a b c d", "x b c y d", "a b c d", [(1, 0), (1, 0)]),
        ("", "x", "", [(1, 0)]),
        ("a", "", "a x y", [(1, 2)]),
        ("a (b) c d", "x c d", "a c x", [(1, 0), (0, 1)]),
        # where the systems take different alternatives, the shorter one's words count
        ("x { a b / c } y", "z a b z", "z c y", [(2, 1)]),
        ("x { a b / c d } y", "z a b z", "z c d y", [(1, 1), (1, 0)]),
        ("x { a b / c } y", "z q b y", "z c y", [(2, 1)]),
        ("x { a b / c } y", "z a q b y", "z c y", [(2, 1)]),
        # a missing word is no word that both have right
        ("x { a / @ } b y", "z b z", "x a b y", [(2, 0)]),
    ],
)
def test_segments_are_separated_by_two_correct_words(ref, a, b, expected):
    assert segments(ref, a, b) == expected
    assert segments(ref, b, a) == [pair[::-1] for pair in expected]


def test_statistic_equals_the_formula():
    rng = np.random.default_rng(0)
    texts = [["a", "b", "c", "d", "e", "f"] for _ in range(80)]
    a = [["x" if rng.random() < 0.3 else word for word in text] for text in texts]
    b = [["x" if rng.random() < 0.1 else word for word in text] for text in texts]
    reports = [system([(" ".join(r), " ".join(h)) for r, h in zip(texts, hyps, strict=True)]) for hyps in (a, b)]
    comparison = matched_pairs(*reports)
    pairs = [
        p
        for first, two in zip(reports[0].utterances, reports[1].utterances, strict=True)
        for p in error_segments(first, two)
    ]
    differences = np.array([first - two for first, two in pairs])
    assert comparison.segments == len(pairs)
    assert comparison.mean == pytest.approx(differences.mean())
    assert comparison.z == pytest.approx(differences.mean() / (differences.std(ddof=1) / math.sqrt(len(pairs))))
    assert comparison.p_value == pytest.approx(math.erfc(abs(comparison.z) / math.sqrt(2)))
    assert comparison.better == "b"
    back = matched_pairs(*reports[::-1])
    assert (back.mean, back.z, back.better) == (-comparison.mean, -comparison.z, "a")
    assert json.loads(json.dumps(comparison.to_dict()))["better"] == "b"


def test_significance_depends_on_the_level():
    reports = [system([("a", hyp) for hyp in hyps]) for hyps in ("xxxa", "aaax")]
    comparison = matched_pairs(*reports)
    assert 0.05 < comparison.p_value < 0.5
    assert comparison.better is None
    assert matched_pairs(*reports, level=0.5).better == "b"


def test_equal_systems_do_not_differ():
    report = system([("a b c", "a x c"), ("a", "a")])
    comparison = matched_pairs(report, report)
    assert (comparison.segments, comparison.mean, comparison.z, comparison.p_value, comparison.better) == (
        1,
        0,
        None,
        1,
        None,
    )
    perfect = system([("a", "a")])
    assert matched_pairs(perfect, perfect).segments == 0


def test_systems_with_other_utterances_or_references_are_refused():
    with pytest.raises(ScoringError, match=r"1 utterance\(s\) are of one system only, such as '1'"):
        matched_pairs(system([("a", "a"), ("b", "b")]), system([("a", "a")]))
    with pytest.raises(ScoringError, match="another reference"):
        matched_pairs(system([("a", "b")]), system([("b", "b")]))
