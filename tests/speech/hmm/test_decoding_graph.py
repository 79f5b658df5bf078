"""The decoding graph against all sentences, each aligned by the training graphs' own code."""

import sys
from concurrent.futures import ThreadPoolExecutor

import kaldifst
import numpy as np
import pytest
from hmm_toys import LEXICON, PHONES, arpa, best_sentence, context_tree, random_model

from speech.hmm.decode import DecodeOptions, GraphSearch
from speech.hmm.decoding_graph import WordTable, _with_loops, compose_lexicon, decoding_graph, grammar, lexicon_fst
from speech.hmm.fst_arrays import FstArrays
from speech.hmm.graphs import GraphOptions
from speech.hmm.tree import monophone_tree

WORDS = WordTable.of(LEXICON)
SPOKEN = GraphOptions(0.4, {("TO", ("T", "AH0")): 0.3}, {"A": 0.9, "TWO": 0.05})


def lg(tmp_path, options=None):
    (tmp_path / "lm.arpa").write_text(arpa())
    lexicon = lexicon_fst(PHONES, LEXICON, WORDS, options)
    return compose_lexicon(lexicon, grammar(tmp_path / "lm.arpa", WORDS)), lexicon.symbols


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_graph_finds_the_best_of_all_sentences(tmp_path, dependent, seed):
    rng = np.random.default_rng(seed)
    model = random_model(rng, context_tree(rng) if dependent else monophone_tree(PHONES))
    options = SPOKEN if seed % 2 else None
    graph = decoding_graph(*lg(tmp_path, options), model.tree, model.transitions)
    scores = (1.5 * rng.normal(size=(int(rng.integers(6, 16)), model.gmm.num_pdfs))).astype(np.float32)
    path = GraphSearch(graph, WORDS, DecodeOptions(beam=1000.0, acoustic_scale=1.0))(scores)
    cost, words = best_sentence(model, scores, options)
    assert path.complete
    assert len(path.pdfs) == len(scores)
    assert path.cost == pytest.approx(cost, abs=2e-2)  # determinization rounds weights to 1/1024
    assert path.words == words or path.cost <= cost


def test_building_the_grammar_prints_nothing(tmp_path, capfd):
    (tmp_path / "lm.arpa").write_text(arpa())
    grammar(tmp_path / "lm.arpa", WordTable.of(["A"]))  # the parser warns of n-grams with other words
    assert capfd.readouterr() == ("", "")


def test_transducer_survives_a_round_trip_through_arrays(tmp_path):
    fst = kaldifst.compile("0 1 3 4 0.5\n0 0 0 2 1.5\n1 0.25\n1 1 7 0 2\n")
    arrays = FstArrays.of(fst)
    assert arrays.arcs["weight"].tolist() == [0.5, 1.5, 2.0]
    assert str(arrays.vector()) == str(fst)
    (tmp_path / "bad").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a constant transducer"):
        FstArrays.read(tmp_path / "bad")


def test_lexicon_missing_a_language_model_word_is_refused():
    with pytest.raises(ValueError, match="lacks 1 words .* NEVER"):
        lexicon_fst(PHONES, LEXICON, WordTable.of([*LEXICON, "NEVER"]))


def test_decoder_accepts_an_empty_utterance():
    fst = FstArrays.of(kaldifst.compile("0 0 1 1 0\n0 0\n"))
    assert GraphSearch(fst, WORDS)(np.zeros((0, 1), dtype=np.float32)).words == ()


def accepted(fst, length):
    """Input sequences of some length with the cost of their best path."""
    costs, waiting = {}, [(fst.start, (), 0.0)]
    while waiting:
        state, labels, cost = waiting.pop()
        if len(labels) == length and fst.finals[state] < np.inf:
            costs[labels] = min(costs.get(labels, np.inf), cost + float(fst.finals[state]))
        for arc in fst.arcs[fst.sources == state].tolist():
            longer = (*labels, arc[0]) if arc[0] else labels
            if len(longer) <= length:
                waiting.append((arc[3], longer, cost + arc[2]))
    return costs


def test_loops_repeat_the_label_of_the_entering_arc():
    # states 1 and 2: entered by several labels, and by one and none
    fst = FstArrays.of(kaldifst.compile("0 1 1 7 1\n0 1 2 0 2\n0 2 2 0 4\n1 2 0 0 8\n2 0\n"))
    looped = _with_loops(fst, np.array([0.25, 0.5]), np.array([4, 6], dtype=np.int32))
    assert accepted(looped, 1) == {(5,): 9.0, (7,): 4.0}
    assert accepted(looped, 3) == {(5, 5, 5): 9.5, (7, 7, 7): 5.0}


def test_threads_can_share_a_search(tmp_path):
    rng = np.random.default_rng(5)
    model = random_model(rng)
    graph = decoding_graph(*lg(tmp_path), model.tree, model.transitions)
    search = GraphSearch(graph, WORDS, DecodeOptions(acoustic_scale=1.0))
    scores = [rng.normal(size=(60 + n, model.gmm.num_pdfs)).astype(np.float32) for n in range(24)]
    alone = [(path.words, path.cost) for path in map(search, scores)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns between any two calls
    try:
        with ThreadPoolExecutor(4) as threads:
            by_threads = [[(path.words, path.cost) for path in threads.map(search, scores)] for _ in range(4)]
    finally:
        sys.setswitchinterval(interval)
    assert by_threads == [alone] * 4
