"""A unigram model with back-off weights scored -3.4 for -3.0, and kaldilm aborted the process on this and other files.

No n-gram is longer than those of the highest order, so nothing backs off from them: KenLM refuses such weights.
"""

import pytest

from speech.hmm.decoding_graph import word_graph
from speech.hmm.topology import PhoneSet
from speech.lm import KenlmModel, read_arpa
from speech.lm.base import LmError
from speech.lm.kenlm import load_lm

UNIGRAMS = "-3.0\t<unk>\n-99\t<s>\t-0.2\n-1.0\t</s>\n-1.0\tone\t-0.1\n-1.0\ttwo\t-0.1\n"
BIGRAMS = "-0.5\t<s> one\t-0.7\n-0.4\tone two\n"
UNIGRAM_MODEL = f"\\data\\\nngram 1=5\n\n\\1-grams:\n{UNIGRAMS}\n\\end\\\n"
MODEL = f"\\data\\\nngram 1=5\nngram 2=2\n\n\\1-grams:\n{UNIGRAMS}\n\\2-grams:\n{BIGRAMS}\n\\end\\\n"
PHONES = PhoneSet.of([("W",), ("T",)])
LEXICON = {"one": [("W",)], "two": [("T",)]}


def kenlm(path):
    lm = load_lm(str(path), ["one", "two"])
    state, first = lm.score(lm.start(False), 0)
    state, second = lm.score(state, 1)
    return first + second + lm.finish(state)[1]


def own(path):
    return read_arpa(path).evaluate([["one", "two"]]).log10


def weights(path):
    """All weights of the graph of words, in log10."""
    lines = str(word_graph(PHONES, LEXICON, path).fst).split("\n")
    return [float(line.split()[-1]) / -2.302585 for line in lines if len(line.split()) in (2, 5)]


def written(tmp_path, text):
    path = tmp_path / "lm.arpa"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "expected"), [(UNIGRAM_MODEL, -3.0), (MODEL, -0.5 - 0.4 - 0.1 - 1.0), (MODEL.replace("\n", "\r\n"), -2.0)]
)
def test_nothing_backs_off_from_the_highest_order(tmp_path, text, expected):
    path = written(tmp_path, text)
    assert kenlm(path) == pytest.approx(expected)
    assert own(path) == pytest.approx(expected)
    assert sum(KenlmModel(path, ["one", "two"]).sentence(["one", "two"])) == pytest.approx(expected)


def test_graphs_of_unigrams_have_no_weight_for_backing_off(tmp_path):
    path = written(tmp_path, UNIGRAM_MODEL)
    plain = tmp_path / "plain.arpa"
    plain.write_text(UNIGRAM_MODEL.replace("\t-0.1", "").replace("\t-0.2", ""))
    assert weights(path) == weights(plain)


@pytest.mark.parametrize(
    "text",
    [
        MODEL,
        MODEL.replace("\n", "\r\n"),
        MODEL.replace("-1.0\ttwo", "-inf\ttwo"),
        MODEL.replace("\t-0.1", "\t-inf"),
        MODEL.replace("ngram 1=5", "ngram  1 = 5"),
    ],
)
def test_graph_is_made_of_models_that_kaldilm_refuses(tmp_path, text):
    graph = word_graph(PHONES, LEXICON, written(tmp_path, text))
    assert graph.words.words == ("one", "two")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ngram 1=5", "ngram 1=4", r"line 10: \\2-grams: was expected, not '-1\.0\\ttwo"),
        ("ngram 1=5", "ngram 1=6", r"line 12: log10 p, 1 words, and perhaps a back-off weight was expected"),
        ("\\end\\", "", r"\\end\\ was expected, not 'the end of the file'"),
        ("-0.4\tone two", "-0.4\tone", r"line 14: log10 p, 2 words"),
        ("-0.4\tone two", "x\tone two", r"line 14: log10 p, 2 words"),
        ("-0.4\tone two", "nan\tone two", r"line 14: log10 p, 2 words"),
        ("\t<s>\t", "\t<x>\t", r"line 12: a 1-gram <s>, the beginning of a sentence, was expected"),
        ("ngram 2=2", "ngram 3=2", r"line 3: \\1-grams: was expected, not 'ngram 3=2'"),
    ],
)
def test_malformed_model_is_named_with_its_line(tmp_path, old, new, said):
    path = written(tmp_path, MODEL.replace(old, new))
    with pytest.raises(LmError, match=r"lm\.arpa, line \d+: .*; write the model again") as caught:
        word_graph(PHONES, LEXICON, path)
    assert caught.match(said)
