"""The reason for a promotion said "decoded by graph with a language model, the champion by graph": both had one.

A registered recognizer's graph contains its language model, and no file of the bundle is named `lm`.
"""

from speech.decoding import GreedyConfig
from speech.decoding.graph import GraphConfig
from speech.decoding.words import WordsConfig
from tasks.tracking.significance import decoder_text, has_lm


def test_graph_decoder_counts_as_having_a_language_model():
    finished = GraphConfig(graph="graph.fst", words="graph-words.txt")
    assert decoder_text(finished, has_lm(finished)) == "graph with a language model"
    assert has_lm(GraphConfig(hmm="model.json", lexicon="l", lm="lm.arpa"))
    assert has_lm(WordsConfig(lm="lm.arpa"))
    assert not has_lm(WordsConfig(words="words.txt"))
    assert not has_lm(GreedyConfig())
