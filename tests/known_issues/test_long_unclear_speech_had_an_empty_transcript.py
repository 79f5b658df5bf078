"""Where a model was unsure for long, the search for the best sentences ended before the first: nothing was recognized.

Fifteen seconds of nearly equal scores in a graph of 400 words were enough. The search for one hypothesis finds words.
"""

import numpy as np

from speech.hmm import lattice as lattices
from speech.hmm.fst_arrays import FstArrays, arc_records, from_arcs
from speech.hmm.lattice import LatticeOptions, LatticeSearch

WORDS, BEAM = 6, 4.0


def loop_of_words() -> FstArrays:
    """Each word is one state that may last; words follow each other."""
    enter = [(0, word, word, 1.0, word) for word in range(1, WORDS + 1)]
    stay = [(word, word, 0, 0.1, word) for word in range(1, WORDS + 1)]
    leave = [(word, 0, 0, 0.1, 0) for word in range(1, WORDS + 1)]
    sources, *columns = (np.array(column) for column in zip(*sorted(enter + stay + leave), strict=True))
    finals = np.full(WORDS + 1, np.inf, dtype=np.float32)
    finals[0] = 0.0
    return from_arcs(0, finals, sources, arc_records(*columns))


def test_best_sentence_is_found_however_large_the_lattice_is(monkeypatch):
    scores = np.random.default_rng(1).normal(size=(40, WORDS)).astype(np.float32)
    lattice = LatticeSearch(loop_of_words())(scores, LatticeOptions(8.0, 1000, BEAM))
    best = lattices.best_paths(lattice, 1, BEAM)[0]
    assert len(best.words) > 5
    monkeypatch.setattr(lattices, "_WORK", 10)
    (path,) = lattices.best_paths(lattice, 100, BEAM)
    assert (path.words, path.starts, path.pdfs.tolist()) == (best.words, best.starts, best.pdfs.tolist())
    assert np.allclose([path.graph, path.acoustic], [best.graph, best.acoustic])
