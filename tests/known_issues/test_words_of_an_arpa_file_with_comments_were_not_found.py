"""The words of an ARPA file that begins with comments, as those of the CMU toolkit do, were not found.

The search refused it as "no ARPA file", although all other readers skip the comments.
"""

import pytest

from speech.lm import read_arpa
from speech.lm.base import LmError
from speech.lm.kenlm import arpa_words

COMMENTS = "#" * 70 + "\n## Copyright (c) 1996, Carnegie Mellon University\n" + "This file is in the ARPA format\n" * 9
MODEL = "\n\\data\\\nngram 1=4\n\n\\1-grams:\n-1.0\t<unk>\n-99\t<s>\n-0.5\t</s>\n-0.5\tone\n\n\\end\\\n"


def test_comments_before_the_model_are_skipped(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(COMMENTS + MODEL)
    assert arpa_words(str(path)) == ["one"]
    assert "one" in read_arpa(path).words


def test_other_text_is_still_refused(tmp_path):
    path = tmp_path / "lm.txt"
    path.write_text(COMMENTS * 10)
    with pytest.raises(LmError, match="is no ARPA file"):
        arpa_words(str(path))
