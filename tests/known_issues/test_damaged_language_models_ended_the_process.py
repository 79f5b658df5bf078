"""Damaged ARPA files ended the process: kaldilm aborts, KenLM allocated a negative number of n-grams."""

import gzip

import pytest

from speech.hmm.decoding_graph import decoding_graph, word_graph
from speech.hmm.topology import PhoneSet, TransitionModel
from speech.hmm.tree import monophone_tree
from speech.lm import KenlmModel, LmError
from speech.lm.kenlm import load_lm

ARPA = """\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1.0\t<unk>
-99\t<s>\t-0.3
-1.0\t</s>
-0.8\ta\t-0.2

\\2-grams:
-0.3\t<s> a
-0.4\ta </s>

\\end\\
"""
PHONES = PhoneSet.of([("A",)])
COUNTS = ["-2", "2.5", "99999999999", "99999999999999999999", "2\nngram 2=2", "2\nngram 4=0", ""]


def written(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["lm.arpa", "lm.arpa.gz"])
def test_impossible_counts_are_refused_before_kenlm_reads_them(tmp_path, name, count):
    assert load_lm(str(written(tmp_path / name, ARPA)), ["a"])
    path = written(tmp_path / name, ARPA.replace("ngram 2=2", f"ngram 2={count}"))
    with pytest.raises(LmError, match="its header"):
        load_lm(str(path), ["a"])
    with pytest.raises(LmError, match="its header"):
        KenlmModel(path, ["a"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-0.8\ta", "nan\ta"),
        ("-0.8\ta", "inf\ta"),
        ("\ta\t-0.2", "\ta\tnan"),
        ("ngram 2=2", "ngram 2=-2"),
        ("ngram 2=2", "ngram 2=99999999999"),
        ("\n\\end\\\n", ""),
        ("-99\t<s>\t-0.3\n", ""),
    ],
)
def test_damaged_file_is_an_error_of_the_graph_and_not_the_end_of_the_process(tmp_path, old, new):
    assert old in ARPA
    path = written(tmp_path / "lm.arpa", ARPA.replace(old, new))
    with pytest.raises(LmError, match=r"lm\.arpa, line \d+: "):
        word_graph(PHONES, {"a": [("A",)]}, path)


def graph_of(path):
    words, tree = word_graph(PHONES, {"a": [("A",)]}, path), monophone_tree(PHONES)
    return decoding_graph(words.fst, words.symbols, tree, TransitionModel(PHONES, tree.transition_keys()))


def test_language_model_without_a_sentence_is_refused(tmp_path):
    assert not graph_of(written(tmp_path / "lm.arpa", ARPA)).fault()
    text = ARPA.replace("-1.0\t</s>\n", "").replace("1=4", "1=3").replace("a </s>", "a a")
    with pytest.raises(LmError, match="has no sentence"):
        graph_of(written(tmp_path / "lm.arpa", text))
