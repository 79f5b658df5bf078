"""Two long transcripts without a common word were aligned for minutes; deep alternatives overflowed Python's stack.

Half an hour of speech in one utterance took a minute or more and longer texts all of the memory; alternatives nested
3,000 deep ended as "maximum recursion depth exceeded", without a file or a line.
"""

import random
import sys
import time

import pytest

from speech.scoring import ScoringError, ScoringRules, load_pairs, score_sets
from speech.scoring.align import TextTooLongError, align, count_operations
from speech.scoring.network import MarkupError, parse_network
from speech.scoring.tracing import trace

alignment = sys.modules["speech.scoring.align"]  # the package has a function of this name
ALTERNATIVES = ScoringRules(alternatives=True)


@pytest.mark.parametrize("seed", range(20))
def test_rows_as_arrays_choose_as_word_by_word(seed, monkeypatch):
    draw = random.Random(seed)
    words = [f"w{number}" for number in range(draw.choice([1, 2, 5, 50]))]
    ref, hyp = ([draw.choice(words) for _ in range(draw.randrange(80))] for _ in range(2))
    steps = []
    for few in (0, 1000):
        monkeypatch.setattr(alignment, "_FEW_WORDS", few)
        steps.append(align(ref, hyp))
    assert steps[0] == steps[1]


def test_thousands_of_words_without_a_match_are_aligned_in_seconds():
    ref, hyp = ([f"{side}{number}" for number in range(5000)] for side in "ab")
    begin = time.process_time()
    assert count_operations(ref, hyp) == (0, 5000, 0, 0)
    assert time.process_time() - begin < 5


def test_texts_beyond_the_bound_are_refused_naming_the_utterance(monkeypatch):
    monkeypatch.setattr(alignment, "MOST_CELLS", 100)
    same_ending = " ".join("abcdefghijkl")
    assert score_sets([("u", f"x {same_ending}", f"y {same_ending}", "", "")]).total.sub == 1
    with pytest.raises(ScoringError, match=r"utterance 'u': a reference of 11 words .* score shorter utterances"):
        score_sets([("u", " ".join("abcdefghijk"), " ".join("ABCDEFGHIJK").replace("A", "ä"), "", "")])


def test_alternatives_of_long_texts_are_refused():
    text = " ".join(["{ a / b }"] * 3000)
    with pytest.raises(TextTooLongError, match="score shorter utterances"):
        trace(text, text.replace("a", "c"), ALTERNATIVES)


def test_deeply_nested_alternatives_are_refused_naming_the_line(tmp_path):
    parse_network("{ " * 60 + "a" + " }" * 60, ALTERNATIVES)
    with pytest.raises(MarkupError, match="nested more than 64 deep"):
        parse_network("{ " * 65 + "a" + " }" * 65, ALTERNATIVES)
    for name, text in (("ref", "{ " * 3000 + "a" + " }" * 3000), ("hyp", "a")):
        (tmp_path / f"{name}.trn").write_text(f"{text} (u-1)\n")
    with pytest.raises(ValueError, match=r"ref\.trn, line 1: alternatives are nested more than 64 deep"):
        load_pairs(tmp_path / "ref.trn", tmp_path / "hyp.trn", ALTERNATIVES)
