"""Of several words on a line of a ctm file only the first was scored: the others counted as deleted."""

import pytest

from speech.scoring import ScoringRules, load_pairs


@pytest.mark.parametrize("rest", ["", " 0.7", " 1", " NA", " -3.5e-1", " 0.9 lex", " NA lex spk1"])
def test_several_words_share_the_time_of_their_line(tmp_path, rest):
    """As in test_ctm.in of NIST's csrfilt, where `5.44 0.38 FAT TISSUE 2.345` becomes two lines of 0.19 s."""
    stm, ctm = tmp_path / "ref.stm", tmp_path / "hyp.ctm"
    stm.write_text("f A s 0 1 \nf A s 1 2 \nf A s 2 3 \n")
    ctm.write_text(f"f A 0.3 1.8 one two three{rest}\nf A 2.2 0.1 end\n")
    assert [row.hyp for row in load_pairs(stm, ctm, ScoringRules()).rows] == ["one", "two three", "end"]
