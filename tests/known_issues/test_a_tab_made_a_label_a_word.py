"""A label of an stm segment was a word if a tab followed it; texts of a rule with a tab in it never fitted."""

import pytest

from speech.scoring import ScoringRules, load_pairs, score_sets
from speech.scoring.formats.stm import read_stm
from speech.scoring.glm import parse_glm

RULES = ScoringRules(alternatives=True)
HYP = {"ctm": "rec A 0.1 0.4 hello\nrec A 0.6 0.4 world\n", "trn": "hello world (a-1)\n", "text": "a-1 hello world\n"}
REF = {
    "ctm": "rec A ann 0 2 <o,f0,female> hello world",
    "trn": "hello world (a-1)",
    "text": "a-1 hello world",
}


@pytest.mark.parametrize("space", [" ", "\t", " \t", "  ", "\t\t"])
@pytest.mark.parametrize("kind", HYP)
def test_columns_and_words_are_separated_by_any_white_space(tmp_path, kind, space):
    ref, hyp = tmp_path / f"ref.{kind.replace('ctm', 'stm')}", tmp_path / f"hyp.{kind}"
    ref.write_text(REF[kind].replace(" ", space) + space + "\n")
    hyp.write_text(HYP[kind].replace(" ", space))
    report = score_sets(load_pairs(ref, hyp, RULES).rows, RULES)
    assert (report.wer, report.total.ref_words) == (0.0, 2)
    assert set(report.labels) == ({"o", "f0", "female"} if kind == "ctm" else set())


@pytest.mark.parametrize("labels", ["<o, f0,female>", "< o,f0 ,female >"])
def test_labels_may_have_spaces_between_them(labels):
    (segment,) = read_stm([f"rec A ann 0 2 {labels} hello"], "x.stm", "ref").segments
    assert (segment.labels, segment.text) == (("o", "f0", "female"), "hello")


@pytest.mark.parametrize("space", ["\t", "  "])
def test_rules_fit_words_that_any_white_space_separates(space):
    rule = "[A B] => [C D] / [ ] __ [ ]".replace(" ", space)
    assert parse_glm([";;", rule]).filter("trn", "ref")("x a b y") == "x C D y"
