"""CTM, TextGrids, and scores far below the rest."""

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recognition.timings import TimedUtterance, ctm_lines, low_confidences, low_scores, textgrid
from speech.hypotheses import Word

WORDS = [Word("one", 0.5, 0.25, 0.9), Word('say "a"', 0.8, 0.2, 0.5)]


def intervals(text):
    """Start, end and text of a TextGrid's intervals, by tier."""
    tiers = {}
    for part in re.split(r"    item \[\d+\]:\n", text)[1:]:
        name = re.search(r'name = "(.*)"', part)[1]
        found = re.findall(r'xmin = ([\d.]+)\n +xmax = ([\d.]+)\n +text = "(.*)"\n', part)
        assert int(re.search(r"intervals: size = (\d+)", part)[1]) == len(found)
        tiers[name] = [(float(a), float(b), c.replace('""', '"')) for a, b, c in found]
    return tiers


def test_ctm_has_a_line_for_each_unit():
    assert ctm_lines("a b", WORDS[:1]) == "a_b 1 0.500 0.250 one 0.9000\n"
    assert ctm_lines("", []) == ""


def test_textgrid_covers_the_time_with_units_and_gaps():
    text = textgrid(1.2, {"words": WORDS, "phones": []})
    assert text.startswith('File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\nxmax = 1.2000\n')
    assert intervals(text) == {
        "words": [(0, 0.5, ""), (0.5, 0.75, "one"), (0.75, 0.8, ""), (0.8, 1.0, 'say "a"'), (1.0, 1.2, "")],
        "phones": [(0, 1.2, "")],
    }


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8), st.integers(0, 100))
def test_intervals_of_any_units_are_contiguous(gaps, duration):
    now, units = 0, []
    for gap, length in gaps:
        units.append(Word("x", (now + gap) / 100, length / 100, 1.0))
        now += gap + length
    found = intervals(textgrid(duration / 100, {"words": units}))["words"]
    assert found[0][0] == 0
    assert found[-1][1] == max(duration, now) / 100
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert sum(text == "x" for _, _, text in found) == sum(unit.duration > 0 for unit in units)


def test_scores_far_below_the_median_are_found_worst_first():
    draw = random.Random(1)
    scores = {f"u{number}": draw.gauss(-50, 1) for number in range(100)}
    assert low_scores(scores) == {}
    found = low_scores(scores | {"bad": -60.0, "worse": -70.0})
    assert list(found) == ["worse", "bad"]
    assert found["worse"] == pytest.approx(20, rel=0.3)
    assert low_scores({"a": -1.0, "b": -90.0}) == {}


def test_nearly_equal_scores_of_a_saturated_ctc_model_are_not_suspicious():
    """Of 2,000 correct digits, 248 were reported, the worst 1,539 deviations below the median."""
    scores = {f"u{number}": -0.0001 * (number % 5) for number in range(100)}
    fine = {"sure": -0.003, "less sure": -0.09}
    found = low_scores(scores | fine | {"wrong word": -0.12, "wrong": -2.0})
    assert list(found) == ["wrong", "wrong word"]
    assert found["wrong"] == pytest.approx(100, rel=0.01)
    assert low_scores(dict.fromkeys(scores, -0.5)) == {}


def test_confidence_of_an_utterance_weighs_words_by_their_duration():
    assert TimedUtterance("u", "s", 1.2, WORDS, [], 0.0).confidence == pytest.approx((0.25 * 0.9 + 0.2 * 0.5) / 0.45)
    assert TimedUtterance("u", "s", 1.2, [], [], 0.0).confidence == 0.0


def test_confidences_below_half_the_median_are_found_lowest_first():
    confidences = {f"u{number}": 0.8 + 0.01 * number for number in range(12)}
    assert low_confidences(confidences) == {}
    assert low_confidences(confidences | {"low": 0.4, "lower": 0.0}) == {"lower": 0.0, "low": 0.4}
    assert low_confidences({"a": 0.9, "b": 0.0}) == {}
