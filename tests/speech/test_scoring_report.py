"""Reports: markup, confusions, worst utterances, the whole text."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from speech.scoring import align, alignment_report, count_confusions, mark, score_sets, text_report, worst_utterances

ROWS = [
    ("u1", "the cat sat down", "the hat sat", "ann", "read"),
    ("u2", "a cat", "now a hat", "bob", "read"),
    ("u3", "", "now", "ann", "phone"),
    ("u4", "all is well", "all is well", "bob", "phone"),
    ("u5", "dog", "log", "bob", "phone"),
]
REPORT = score_sets(ROWS)


def test_markup_shows_the_errors():
    assert mark(align(["the", "cat", "sat", "down"], ["the", "hat", "sat"])) == "the (cat->hat) sat (-down)"
    assert mark(align(["a"], ["a", "b"])) == "a (+b)"
    assert mark([]) == ""


def test_confusions_are_sorted_by_count_then_name():
    confusions = count_confusions(REPORT)
    assert confusions.substitutions == [("cat", "hat", 2), ("dog", "log", 1)]
    assert confusions.deletions == [("down", 1)]
    assert confusions.insertions == [("now", 2)]


@given(st.lists(st.tuples(st.text("ab ", max_size=12), st.text("ab ", max_size=12)), max_size=8))
@settings(max_examples=60)
def test_confusions_add_up(texts):
    report = score_sets((str(i), ref, hyp, "", "") for i, (ref, hyp) in enumerate(texts))
    confusions = count_confusions(report)
    assert sum(count for _, _, count in confusions.substitutions) == report.total.sub
    assert sum(count for _, count in confusions.deletions) == report.total.dele
    assert sum(count for _, count in confusions.insertions) == report.total.ins


def test_confusions_are_a_json_value():
    value = json.loads(json.dumps(count_confusions(REPORT).to_dict(limit=1)))
    assert value == {
        "substitutions": [{"ref": "cat", "hyp": "hat", "count": 2}],
        "deletions": [{"ref": "down", "count": 1}],
        "insertions": [{"hyp": "now", "count": 2}],
    }


def test_worst_utterances_come_first():
    assert [alike.worst.id for alike in worst_utterances(REPORT)] == ["u2", "u1", "u3", "u5"]
    assert [alike.worst.id for alike in worst_utterances(REPORT, 1)] == ["u2"]


def test_worst_utterances_are_one_of_each_speaker_and_text():
    heard = {"theo": ["two", "six", "two", "zero"], "ann": ["two", "zero"], "": ["zero", "zero"]}
    rows = [(f"0_{who}_{n}", "zero", hyp, who, "") for who, hyps in heard.items() for n, hyp in enumerate(hyps)]
    report = score_sets([*rows, ("s", "one  two", "", "theo", ""), ("t", "one two", "one", "theo", "")])
    alike = worst_utterances(report)
    assert [(a.worst.id, a.worst.hyp, a.wrong, a.spoken) for a in alike] == [
        ("s", "", 2, 2),
        ("0_theo_0", "two", 3, 4),
        ("0_ann_0", "two", 1, 2),
    ]
    assert alike[1].to_dict() == alike[1].worst.to_dict() | {"wrong": 3, "spoken": 4}
    assert "0_theo_0  1 error, 1 word; 3 of 4 alike have errors\n  (zero->two)\n" in text_report(report)


def test_alignment_report_lists_each_utterance():
    assert alignment_report(REPORT.utterances[:1]) == "u1  2 errors, 4 words\n  the (cat->hat) sat (-down)\n"
    assert "u5  1 error, 1 word\n" in alignment_report(REPORT.utterances)


def test_text_report_has_all_sections():
    text = text_report(REPORT)
    for part in ("WER %", "ann", "phone", "Substitutions", "cat -> hat", "Deletions", "Insertions", "Worst utterances"):
        assert part in text
    assert all(row[0] in text for row in ROWS)
    assert "60.00" in text


def test_text_report_without_utterances():
    text = text_report(score_sets([]))
    assert "none" in text
    assert "-" in text
    silent = text_report(score_sets([("u", "", "oh", "s", "d")]))
    assert "(+oh)" in silent
