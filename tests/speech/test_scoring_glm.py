"""Global mapping rules; every expected text was made with NIST's csrfilt (Debian's sctk 2.4.10)."""

import pytest

from speech.scoring import PairingRules, ScoringRules, TranscriptError, load_pairs, read_glm
from speech.scoring.glm import parse_glm

HEADER = [";; first line", "* format = 'NIST1'", "* copy_no_hit = 'T'", "* case_sensitive = 'F'"]
WORD = " / [ ] __ [ ]"


def changed(rules, text, **options):
    return parse_glm([*HEADER, *rules]).filter("trn", "ref", **options)(text)


@pytest.mark.parametrize(
    ("rules", "text", "expected"),
    [
        ([f"[AB] => [X Y]{WORD}"], "ab ab cab abc AB", "X Y X Y cab abc X Y"),
        (["[AB] => [X]"], "ab cab abc", "X cX Xc"),
        (["[Q] => [R] / __"], "q qq aq", "R RR aR"),
        ([f"[IT'S] => [{{IT IS / IT HAS}}]{WORD}"], "it's", "{IT IS / IT HAS}"),
        ([f"A => B{WORD}", f"[Z] => @{WORD}"], "a z", "B @"),
        # the first rule of the file that fits, not the longest
        ([f"[A] => [1]{WORD}", f"[A B] => [2]{WORD}"], "a b a c", "1 b 1 c"),
        ([f"[A B] => [2]{WORD}", f"[A] => [1]{WORD}"], "a b a c", "2 1 c"),
        (["[AB] => [1]", "[A] => [2]"], "abc ab a", "1c 1 2"),
        # replaced text is not searched again, and contexts are those of the original text
        ([f"[A] => [B]{WORD}", f"[B] => [C]{WORD}"], "a b", "B C"),
        ([f"[L] => [Q]{WORD}", "[A] => [1] / [L ] __ [ ]", "[C] => [2] / [Q ] __ [ ]"], "l a l c", "Q 1 Q c"),
        (["[A] => [1] / [X ] __ [ Y]"], "x a y a y xx a y", "x 1 y a y xx 1 y"),
        ([f"[A] => []{WORD}"], "b a c", "b c"),
        ([f"[[NOISE]] => [%N]{WORD}", f"[<B>] => [X]{WORD}"], "[noise] <b>", "%N X"),
        ([f"[A] => [1]{WORD} ;; comment", ";; comment", "", f"[C] => [2;3]{WORD}"], "a c", "1 2;3"),
        # without brackets, a side may have several words; quotes keep spaces at its ends
        (["TEA SPOON => TEASPOON"], "tea spoon tea spoons", "TEASPOON TEASPOONs"),
        (['" AB " => " A B "', '"Q => QUOTE ;; comment'], 'ab cab "q', "A B cab QUOTE"),
        # only what the file begins with, here two semicolons, marks comments
        ([";DOT-DOT => COLON", "; not a rule"], ";dot-dot", "COLON"),
        (["{B => [LEFT]", "[IN] => [OUT] / [ ] __X [ ]"], "in {b", "OUT LEFT"),
        # parentheses are words of their own while rules are applied, and go around each word afterwards
        ([f"[UH] => [(%HES)]{WORD}", f"[B] => [X Y]{WORD}"], "uh (uh) (a b)", "(%HES) ((%HES)) (a) (X) (Y)"),
    ],
)
def test_rules_are_applied_like_csrfilt(rules, text, expected):
    assert changed(rules, text) == expected


def test_hyphens_within_words_are_split_afterwards():
    rule = f"[UH-HUH] => [%BC]{WORD}"
    text = "uh-huh x-y- (z-) -a-b mother-in-law x--y"
    assert changed([rule], text, split_hyphens=True) == "%BC x y- (z-) -a b mother in law x -y"
    assert changed([rule], text) == "%BC x-y- (z-) -a-b mother-in-law x--y"


def test_first_characters_of_the_file_mark_comments():
    lines = ["%% first", f"[A] => [B]{WORD} %% [C] => [D]", f"%% [C] => [D]{WORD}", f"[E] => [F]{WORD}"]
    assert parse_glm(lines).filter("trn", "ref")("a c e %%") == "B c F %%"
    assert parse_glm(["* name 'x'", f"[A] => [B]{WORD} ;; comment"]).filter("trn", "ref")("a") == "B"
    assert parse_glm(['"Q => QUOTE', '"R => R']).filter("trn", "ref")('"q "r') == "QUOTE R"


def test_case_is_handled_like_csrfilt():
    rule = f"[a] => [xY]{WORD}"
    sensitive = parse_glm([";;", rule])
    assert sensitive.filter("trn", "ref", ignore_case=False)("A a") == "A xY"
    assert sensitive.filter("trn", "ref")("A a") == "xY xY"
    assert changed([rule], "A a", ignore_case=False) == "xY xY"
    assert sensitive.filter("trn", "ref")("İ A b") == "İ xY b"  # its lower case has two characters


def test_rules_may_apply_to_some_inputs_only():
    lines = [';; INPUT_DEPENDENT_APPLICATION = "ctm"', f"[A] => [CTM]{WORD}"]
    lines += [';; INPUT_DEPENDENT_APPLICATION = "STM|ref"', f"[A] => [REF]{WORD}"]
    lines += [';; INPUT_DEPENDENT_APPLICATION = ".*"', f"[C] => [ALL]{WORD}"]
    glm = parse_glm(lines)
    assert glm.filter("trn", "ref")("a c") == "REF ALL"
    assert glm.filter("trn", "hyp")("a c") == "a ALL"
    assert glm.filter("ctm", "hyp")("a c") == "CTM ALL"


@pytest.mark.parametrize(
    ("expression", "applies"),
    [("*", True), ("ctm|stm", True), ("^(ctm|trn)$", True), ("[cs]tm", True), ("c.m", True), ("trn|hyp", False)],
)
def test_expressions_of_inputs_fit_as_regular_expressions_do(expression, applies):
    lines = [f';; INPUT_DEPENDENT_APPLICATION = "{expression}"', f"[A] => [B]{WORD}"]
    assert parse_glm(lines).filter("ctm", "ref")("a") == ("B" if applies else "a")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[A] = [B]", r"x\.glm, line 2: not a rule: '\[A\] = \[B\]'; write: \[old\] => \[new\]"),
        ("[A => [1] / [ ] __ [ ]", "not a rule"),
        ("[A] => {[1] / [2]} / [ ] __ [ ]", "not a rule"),
        ("[A] => [1] / [ ] [ ]", "not a rule"),
        ("[] => [1]", "nothing to replace"),
        ("* format = 'NIST2'", "format 'NIST2' is not supported"),
        ("* copy_no_hit = 'F'", "copy_no_hit must be 'T'"),
        (';; INPUT_DEPENDENT_APPLICATION = "("', "is not supported: write formats and sides"),
        # these would fill the memory, or never end
        (f';; INPUT_DEPENDENT_APPLICATION = "{"(?:" * 5}x?{"){99}" * 5}"', r"x\.glm, line 2: .* is not supported"),
        (';; INPUT_DEPENDENT_APPLICATION = "(a+)+$"', "is not supported"),
        (f';; INPUT_DEPENDENT_APPLICATION = "{"(|a)" * 30}b"', "with at most 80 characters"),
        ("[A] => " * 400, "the longest may have 2000"),
    ],
)
def test_malformed_rules_are_named(tmp_path, line, message):
    (tmp_path / "x.glm").write_text(f";; c\n{line}\n")
    with pytest.raises(TranscriptError, match=message):
        read_glm(tmp_path / "x.glm")


def test_parentheses_that_do_not_match_are_named_by_line(tmp_path):
    (tmp_path / "ref.txt").write_text("u1 a\nu2 (b\n")
    with pytest.raises(TranscriptError, match=r"ref\.txt, line 2: parentheses in '\(b' do not match"):
        load_pairs(tmp_path / "ref.txt", tmp_path / "ref.txt", ScoringRules(), PairingRules(split_hyphens=True))


def test_words_made_by_a_rule_share_the_original_time(tmp_path):
    (tmp_path / "ref.stm").write_text("f A s 0 1 a\nf A s 1 2 b\n")
    (tmp_path / "hyp.ctm").write_text("f A 0.55 0.8 ab\n")
    rules = parse_glm(["[AB] => [A B] / [ ] __ [ ]"])
    ref, hyp, read = tmp_path / "ref.stm", tmp_path / "hyp.ctm", ScoringRules(alternatives=True, ignore_case=True)
    assert [row.hyp for row in load_pairs(ref, hyp, read, PairingRules(glm=rules)).rows] == ["A", "B"]
    rules = parse_glm(["[AB] => [{A B / C}] / [ ] __ [ ]"])
    assert [row.hyp for row in load_pairs(ref, hyp, read, PairingRules(glm=rules)).rows] == ["", "{A B / C}"]
