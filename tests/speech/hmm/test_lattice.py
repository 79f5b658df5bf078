"""Lattices against all paths of small graphs and against numpy, and their best word sequences against all sentences."""

import math

import kaldifst
import lattice_in_numpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.hmm import lattice as lattices
from speech.hmm.fst_arrays import FstArrays, arc_records, from_arcs
from speech.hmm.lattice import Lattice, LatticeOptions, LatticeSearch, best_paths

WIDE = 1e6


def random_graph(rng, states=7, pdfs=4, words=3):
    """Arcs with and without frames and words; those without frames lead forward, so that there is no cycle of them."""
    rows = []
    for source in range(states):
        for _ in range(int(rng.integers(1, 4))):
            label, target = int(rng.integers(0, pdfs + 1)), int(rng.integers(0, states))
            if label == 0 and target <= source:
                label = 1
            word = int(rng.integers(1, words + 1)) if rng.random() < 0.4 else 0
            rows.append((source, label, word, float(rng.normal()), target))
    sources, *columns = (np.array(column) for column in zip(*rows, strict=True))
    finals = np.where(rng.random(states) < 0.4, rng.normal(size=states), np.inf).astype(np.float32)
    return from_arcs(0, finals, sources, arc_records(*columns))


def all_paths(graph, scores):
    """Every path over all frames: words, the frame of each, pdfs, graph cost, acoustic cost, final cost."""
    ended, waiting = [], [(graph.start, (), (), (), 0.0, 0.0)]
    while waiting:
        state, words, starts, pdfs, cost, acoustic = waiting.pop()
        if len(pdfs) == len(scores):
            final = float(graph.finals[state])
            ended.append((words, starts, pdfs, cost, acoustic, final))
        for label, word, weight, target in graph.arcs[graph.sources == state].tolist():
            if label and len(pdfs) == len(scores):
                continue
            after = (*words, word) if word else words
            at = (*starts, len(pdfs)) if word else starts
            said = (*pdfs, label - 1) if label else pdfs
            more = -float(scores[len(pdfs), label - 1]) if label else 0.0
            waiting.append((target, after, at, said, cost + weight, acoustic + more))
    complete = any(path[-1] < math.inf for path in ended)
    ends = [path[-1] if complete else 0.0 for path in ended]
    return [(*path[:3], path[3] + end, path[4]) for path, end in zip(ended, ends, strict=True) if end < math.inf]


def best_sentences(paths):
    """The cost of the best path of each word sequence."""
    costs = {}
    for words, _, _, cost, acoustic in paths:
        costs[words] = min(costs.get(words, math.inf), cost + acoustic)
    return costs


def example(seed, frames=4):
    rng = np.random.default_rng(seed)
    return random_graph(rng), rng.normal(size=(frames, 4)).astype(np.float32)


seeds = st.integers(0, 1_000_000)


@given(seed=seeds, frames=st.integers(1, 5), limit=st.sampled_from([1, 3, 10_000]))
@settings(max_examples=60)
def test_best_paths_equal_those_of_exhaustive_search(seed, frames, limit):
    graph, scores = example(seed, frames)
    paths = all_paths(graph, scores)
    lattice = LatticeSearch(graph)(scores, LatticeOptions(WIDE, 10_000, WIDE))
    if not paths:
        assert lattice is None
        return
    wanted = best_sentences(paths)
    best = best_paths(lattice, limit, WIDE)
    assert lattice.complete == any(np.isfinite(graph.finals[state]) for state in last_states(graph, scores))
    assert len({path.words for path in best}) == len(best) == min(limit, len(wanted))
    assert [path.cost for path in best] == pytest.approx(sorted(wanted.values())[:limit], abs=1e-5)
    for path in best:
        assert path.cost == pytest.approx(wanted[path.words], abs=1e-5)
        key = (path.words, path.starts, tuple(path.pdfs.tolist()))
        split = [(cost, acoustic) for *path, cost, acoustic in paths if tuple(path) == key]
        assert any((path.graph, path.acoustic) == pytest.approx(pair, abs=1e-5) for pair in split)


@pytest.mark.parametrize("seed", range(60))
def test_compiled_search_gives_the_same_bits_as_numpy(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, states=int(rng.integers(3, 30)), words=int(rng.integers(1, 6)))
    scores = rng.normal(size=(int(rng.integers(1, 60)), 4)).astype(np.float32)
    beam, active = float(rng.choice([0.5, 2.0, 6.0, WIDE])), int(rng.choice([1, 3, 10, 10_000]))
    options = LatticeOptions(beam, active, float(rng.choice([0.5, 2.0, 5.0])))
    for module in (lattices, lattice_in_numpy):
        monkeypatch.setattr(module, "_BLOCK", 1 + seed % 7)
        monkeypatch.setattr(module, "_WORK", 10_000)
    compiled, wanted = LatticeSearch(graph)(scores, options), lattice_in_numpy.LatticeSearch(graph)(scores, options)
    if wanted is None:
        assert compiled is None
        return
    assert_equal(compiled, wanted)
    paths = best_paths(compiled, 50, options.lattice_beam)
    wanted_paths = lattice_in_numpy.best_paths(wanted, 50, options.lattice_beam)
    assert len(paths) == len(wanted_paths)
    for path, wanted_path in zip(paths, wanted_paths, strict=True):
        assert_equal(path, wanted_path)


def assert_equal(one, other):
    """Each attribute is the same, to the bit."""
    for name, value in vars(other).items():
        assert np.array_equal(getattr(one, name), value), name
        assert not hasattr(value, "dtype") or getattr(one, name).dtype == value.dtype


def last_states(graph, scores):
    """States that some path of as many frames reaches."""
    reached = {graph.start}
    for number in range(len(scores) + 1):
        grown = True
        while grown:
            more = {row[3] for state in reached for row in graph.arcs[graph.sources == state].tolist() if not row[0]}
            grown = not more <= reached
            reached |= more
        if number < len(scores):
            reached = {row[3] for state in reached for row in graph.arcs[graph.sources == state].tolist() if row[0]}
    return reached


@given(seed=seeds, beam=st.sampled_from([0.5, 2.0, 4.0]))
@settings(max_examples=40)
def test_lattice_has_exactly_the_arcs_within_its_beam(seed, beam):
    graph, scores = example(seed, 5)
    paths = all_paths(graph, scores)
    if not paths:
        return
    lattice = LatticeSearch(graph)(scores, LatticeOptions(WIDE, 10_000, beam))
    wanted = best_sentences(paths)
    best = min(wanted.values())
    inside = {words: cost for words, cost in wanted.items() if cost <= best + beam - 1e-4}
    outside = {words for words, cost in wanted.items() if cost > best + beam + 1e-4}
    costs = {path.words: path.cost for path in best_paths(lattice, 100_000, beam)}
    assert {words: costs[words] for words in inside} == pytest.approx(inside, abs=1e-5)
    assert not outside & costs.keys()
    assert above_best(lattice).max() <= beam + 1e-6


def above_best(lattice: Lattice):
    """For each arc, how much its best path costs more than the best of all."""
    costs = lattice.graph + lattice.acoustic
    before = np.full(len(lattice.finals), np.inf)
    before[0] = 0.0
    assert (lattice.targets > lattice.sources).all()  # states are in topological order
    for source, target, cost in zip(lattice.sources, lattice.targets, costs, strict=True):
        before[target] = min(before[target], before[source] + cost)
    remaining = lattice.remaining()
    assert np.min(before + lattice.finals) == pytest.approx(remaining[0])
    return before[lattice.sources] + costs + remaining[lattice.targets] - remaining[0]


@pytest.mark.parametrize("seed", range(8))
def test_pruning_during_the_search_changes_nothing(seed, monkeypatch):
    graph, scores = example(seed, 40)
    search = LatticeSearch(graph)
    blocks = []
    for size in (1000, 7, 1):
        monkeypatch.setattr("speech.hmm.lattice._BLOCK", size)
        blocks.append(search(scores, LatticeOptions(WIDE, 10_000, 3.0)))
    if blocks[0] is None:
        return
    assert len(blocks[0].sources) == len(blocks[1].sources) == len(blocks[2].sources)
    best = [[(path.words, pytest.approx(path.cost)) for path in best_paths(lattice, 20, 3.0)] for lattice in blocks]
    assert best[0] == best[1] == best[2]


def long_graph():
    """A loop over three words of two states each, which begin alike."""
    text = "0 1 1 0 0.1\n1 1 1 0 0.2\n1 2 2 1 1\n1 2 3 2 1.2\n1 2 4 3 1.1\n2 2 2 0 0.3\n2 0 0 0 0.05\n2 0\n"
    return FstArrays.of(kaldifst.compile(text))


def test_prefixes_with_equal_continuations_share_states(monkeypatch):
    # each word lasts two frames, so all prefixes of as many words lead to one state
    graph = FstArrays.of(kaldifst.compile("0 1 1 0 0.1\n1 0 2 1 1\n1 0 3 2 1.2\n1 0 4 3 1.1\n0 0\n"))
    scores = np.random.default_rng(5).normal(size=(30, 4)).astype(np.float32)
    lattice = LatticeSearch(graph)(scores, LatticeOptions(WIDE, 1000, 9.0))
    monkeypatch.setattr(lattices, "_WORK", len(lattice.sources) + 1)  # enough to look at each arc once
    best = best_paths(lattice, 300, 9.0)
    assert len(best) == 300
    assert [path.cost for path in best] == pytest.approx(sorted(path.cost for path in best))
    assert {path.starts for path in best} == {tuple(range(1, 30, 2))}


def test_bounded_search_finds_the_best_sequences(monkeypatch):
    scores = np.random.default_rng(6).normal(size=(30, 4)).astype(np.float32)
    lattice = LatticeSearch(long_graph())(scores, LatticeOptions(WIDE, 1000, 8.0))
    everything = best_paths(lattice, 500, 8.0)
    monkeypatch.setattr(lattices, "_WORK", 3000)
    some = best_paths(lattice, 500, 8.0)
    assert 0 < len(some) < len(everything)
    assert [path.words for path in some] == [path.words for path in everything[: len(some)]]


@pytest.mark.parametrize(("beam", "active"), [(1.0, 1000), (WIDE, 1), (WIDE, 2)])
def test_narrow_search_finds_existing_paths(beam, active):
    for seed in range(30):
        graph, scores = example(seed, 5)
        lattice = LatticeSearch(graph)(scores, LatticeOptions(beam, active, 5.0))
        if lattice is None:
            continue
        costs = {}
        for words, starts, pdfs, cost, acoustic in all_paths(graph, scores):
            costs.setdefault((words, starts, pdfs), []).append(cost + acoustic)
        for path in best_paths(lattice, 10, 5.0):
            key = (path.words, path.starts, tuple(path.pdfs.tolist()))
            if lattice.complete:
                assert min(abs(path.cost - cost) for cost in costs[key]) < 1e-4


def test_only_the_best_tokens_of_a_frame_survive():
    # the first word is cheaper after one frame, the second after two
    graph = FstArrays.of(kaldifst.compile("0 1 1 1 1\n0 2 1 2 2\n1 3 1 0 5\n2 3 1 0 1\n3 0\n"))
    scores = np.zeros((2, 1), dtype=np.float32)
    costs = {}
    for active in (1, 2):
        lattice = LatticeSearch(graph)(scores, LatticeOptions(WIDE, active, WIDE))
        costs[active] = {path.words: path.cost for path in best_paths(lattice, 10, WIDE)}
    assert costs == {1: {(1,): 6.0}, 2: {(2,): 3.0, (1,): 6.0}}
    narrow = LatticeSearch(graph)(scores, LatticeOptions(0.5, 10, WIDE))
    assert [path.words for path in best_paths(narrow, 10, WIDE)] == [(1,)]


def test_dead_end_and_empty_utterance_give_no_hypothesis():
    graph = FstArrays.of(kaldifst.compile("0 1 1 1 0\n1 0\n"))
    search, options = LatticeSearch(graph), LatticeOptions(WIDE, 10, WIDE)
    assert search(np.zeros((0, 2), dtype=np.float32), options) is None
    assert search(np.zeros((2, 2), dtype=np.float32), options) is None
    for impossible in (-np.inf, np.nan):
        assert search(np.full((1, 2), impossible, dtype=np.float32), options) is None
    lattice = search(np.zeros((1, 2), dtype=np.float32), options)
    (only,) = best_paths(lattice, 5, WIDE)
    assert (only.words, only.starts, only.cost) == ((1,), (0,), 0.0)


def test_empty_word_sequence_is_a_separate_hypothesis():
    graph = FstArrays.of(kaldifst.compile("0 0 1 0 0.5\n0 0 2 7 0\n0 0\n"))
    lattice = LatticeSearch(graph)(np.zeros((2, 2), dtype=np.float32), LatticeOptions(WIDE, 10, WIDE))
    best = best_paths(lattice, 10, WIDE)
    assert [(path.words, round(path.cost, 4)) for path in best] == [((7, 7), 0.0), ((7,), 0.5), ((), 1.0)]
