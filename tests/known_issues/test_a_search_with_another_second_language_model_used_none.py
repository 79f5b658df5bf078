"""A search over tokens that was made from a prepared one, and named a second language model, did not read it."""

import pytest
from support import load_beside

rescoring = load_beside(__file__, "../speech/decoding/test_rescoring_token_searches.py")


@pytest.fixture
def lm(tmp_path):
    (tmp_path / "words.arpa").write_text(rescoring.WORDS)
    return str(tmp_path / "words.arpa")


def test_second_language_model_is_read_that_the_search_before_had_not(lm):
    for search_with, heard in rescoring.searches():
        first = search_with()
        plain = first(*heard)  # which reads what it names
        again = {"rescore_lm": lm, "rescore_weight": 3.0, "rescore_nbest": 1000}
        ranked = first.with_config(first.cfg.model_copy(update=again))(*heard)
        assert ranked == search_with(**again)(*heard)
        assert ranked != plain
