"""NIST transcript files: reading, writing, and what is wrong in which line."""

from functools import partial
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.scoring import TranscriptError, format_trn, parse_trn, read_trn, write_trn


def test_trn_lines_are_read(tmp_path):
    path = tmp_path / "ref.trn"
    path.write_text(
        ";; a comment\nthe cat  sat (ann-1)\n\n  (ann-2)\r\nnaïve (noise) café ( bob-1 ) \n", encoding="utf-8"
    )
    assert read_trn(path) == {"ann-1": "the cat sat", "ann-2": "", "bob-1": "naïve (noise) café"}
    assert list(read_trn(str(path))) == ["ann-1", "ann-2", "bob-1"]


def test_trn_lines_are_written(tmp_path):
    path = tmp_path / "hyp.trn"
    write_trn(path, {"ann-1": "the cat", "ann-2": ""})
    assert path.read_bytes() == b"the cat (ann-1)\n(ann-2)\n"


def composed(least, most):
    """Texts as they are read: in composed letters."""
    letters = st.characters(exclude_categories=["Cs"])
    return st.text(letters, min_size=least, max_size=most).map(partial(normalize, "NFC"))


@given(
    st.dictionaries(
        composed(1, 12),
        composed(0, 30),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=100)
def test_utterances_survive_a_round_trip(tmp_path_factory, texts):
    path = tmp_path_factory.getbasetemp() / "round.trn"
    write_trn(path, texts)
    assert read_trn(path) == {id_: " ".join(text.split()) for id_, text in texts.items()}


def test_ids_are_escaped():
    assert format_trn({"take 1 (loud) 100%": "a"}) == "a (take%201%20%28loud%29%20100%25)\n"
    assert dict(parse_trn(["a (take%201)"])) == {"take 1": "a"}


@pytest.mark.parametrize("text", [";; no comment", "\ufeffmarked", "ends (so)", "(so)", ") (", "50%"])
def test_awkward_texts_survive_a_round_trip(tmp_path, text):
    write_trn(tmp_path / "one.trn", {"u": text})
    assert read_trn(tmp_path / "one.trn") == {"u": text}


@pytest.mark.parametrize("line", ["no id here", "the cat (ann 1)", "the cat ()", "the cat (ann-1) more", "(ann-1"])
def test_lines_without_an_id_are_refused(tmp_path, line):
    path = tmp_path / "bad.trn"
    path.write_text(f"a (u1)\n\n{line}\n")
    with pytest.raises(TranscriptError, match=r"bad\.trn, line 3: no utterance id"):
        read_trn(path)


def test_duplicate_id_is_refused():
    with pytest.raises(TranscriptError, match=r"hyp, line 3: utterance 'u1' was already in line 1"):
        list(parse_trn(["a (u1)", "b (u2)", "c (u1)"], "hyp"))


def test_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.trn"
    path.write_text("café (u1)\n", encoding="latin-1")
    with pytest.raises(TranscriptError, match="UTF-8"):
        read_trn(path)


def test_empty_id_is_refused_without_writing_a_file(tmp_path):
    with pytest.raises(TranscriptError, match="empty id"):
        write_trn(tmp_path / "hyp.trn", {"u1": "a", "": "the cat"})
    assert not (tmp_path / "hyp.trn").exists()
