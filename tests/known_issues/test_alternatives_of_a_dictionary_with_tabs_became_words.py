"""In a dictionary with tabs, as Sphinx's lmtool writes them, `READ(2)` was a word of its own.

The pronunciation was lost to READ: the format was taken for that of the Montreal Forced Aligner.
"""

import pytest

from speech.lexicon import read_lexicon

SPHINX = "LEAD\tL EH D\nLEAD(2)\tL IY D\nREAD\tR EH D\nREAD(2)\tR IY D\n"
MFA = "lead\tL EH1 D\nlead\tL IY1 D\n"


@pytest.mark.parametrize("text", [SPHINX, SPHINX.replace("\t", "  ")])
def test_alternatives_belong_to_their_word(tmp_path, text):
    (tmp_path / "x.dic").write_text(text)
    parsed = read_lexicon(tmp_path / "x.dic")
    assert parsed.format == "cmudict"
    assert {word: len(variants) for word, variants in parsed.entries.items()} == {"LEAD": 2, "READ": 2}


def test_other_dictionaries_with_tabs_are_those_of_the_aligner(tmp_path):
    (tmp_path / "x.dict").write_text(MFA)
    assert read_lexicon(tmp_path / "x.dict").format == "mfa"
