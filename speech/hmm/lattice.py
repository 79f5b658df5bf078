"""Lattices: all paths through a decoding graph whose costs are close to the best path's, and their best sentences.

The search is Viterbi beam search that keeps every arc between surviving tokens (Ljolje et al. 1999). Arcs are on a path
within `lattice_beam` of the best one, exactly: forward costs come from the search, backward costs from a pass over what
it kept. kaldi-decoder's lattice decoder has no limit of active states: where a model is unsure it takes minutes for
seconds of audio. This one has the limit. `speech.hmm.compiled_lattice` has the loops, which numba compiles.

A lattice has many paths for one word sequence: other times, other pronunciations. The search for the best word
sequences goes over sequences. A prefix of words stands for all lattice states that its paths lead to, each with the
cost of the best such path; this is determinization on words, made only where the search goes. Prefixes are taken in the
order of their best completion, which is known exactly, so that sentences come out in the order of their costs (A*,
Soong and Huang 1991).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from speech.compiled import one_compiles
from speech.hmm.compiled_lattice import Arcs, GraphArrays, assemble, best_sentences, remaining, search
from speech.hmm.fst_arrays import FstArrays, arc_records, from_arcs

_Floats = NDArray[np.float64]
_Places = NDArray[np.int64]
_BLOCK = 100
"""Frames after which arcs that are far from every surviving path are dropped, to save memory."""


@dataclass(frozen=True)
class Lattice:
    """An acyclic graph of paths; states are in topological order, and the first one is where all paths begin.

    Attributes:
        frames: int32 `[S]`, frames before each state.
        finals: float64 `[S]`, final costs, infinite where no path ends.
        sources: int32 `[A]`, sorted: the state that each arc leaves.
        targets: int32 `[A]`.
        pdfs: int32 `[A]`, the tied state of the frame that an arc consumes; -1 if it consumes none.
        words: int32 `[A]`, the word that an arc puts out, by its number in the graph; 0 for none.
        graph: float64 `[A]`, costs of the graph: language model, pronunciations, transitions.
        acoustic: float64 `[A]`, scaled negative log likelihoods.
        complete: Whether paths end in final states of the graph; if the search reached none, they end anywhere.
    """

    frames: NDArray[np.int32]
    finals: _Floats
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    pdfs: NDArray[np.int32]
    words: NDArray[np.int32]
    graph: _Floats
    acoustic: _Floats
    complete: bool

    def remaining(self) -> _Floats:
        """The cost of the best way from each state to an end `[S]`."""
        return self.arcs().remaining

    def arcs(self) -> Arcs:
        """What the search for the best sentences reads."""
        first = np.searchsorted(self.sources, np.arange(len(self.finals) + 1))
        costs, spoken = self.graph + self.acoustic, np.flatnonzero(self.words)
        kinds, pairs = np.unique(self.words[spoken].astype(np.int64) << 32 | self.targets[spoken], return_inverse=True)
        numbers = np.full(len(self.words), -1, dtype=np.int64)
        numbers[spoken] = pairs
        words = np.unique(kinds >> 32, return_inverse=True)[1]
        best = remaining(first, self.targets, costs, self.finals)
        return Arcs(first, self.sources, self.targets, costs, self.finals, best, numbers, words)


@dataclass(frozen=True)
class LatticeOptions:
    """Parameters of a search.

    Attributes:
        beam: Tokens with a cost this much above the frame's best one are dropped.
        max_active: Most tokens of a frame from which the search goes on.
        lattice_beam: Paths with a cost this much above the best one's belong to the lattice.
    """

    beam: float
    max_active: int
    lattice_beam: float


class LatticeSearch:
    """Searches a graph; several threads may call it.

    Args:
        graph: The decoding graph: input labels are pdf + 1.
    """

    def __init__(self, graph: FstArrays) -> None:
        spoken = graph.arcs["ilabel"] > 0
        kinds = 2 * graph.sources.astype(np.int64) + spoken
        first = np.zeros(2 * len(graph.finals) + 1, dtype=np.int64)
        np.cumsum(np.bincount(kinds, minlength=2 * len(graph.finals)), out=first[1:])
        arcs = graph.arcs[np.argsort(kinds, kind="stable")]
        self._graph = GraphArrays(graph.start, graph.finals.astype(np.float64), first, arcs)

    def __call__(self, scores: NDArray[np.float32], options: LatticeOptions) -> Lattice | None:
        """The lattice of an utterance.

        Args:
            scores: Scaled log likelihoods `[T, P]`.
            options: Width of the search and of the lattice.

        Returns:
            The lattice; None if no path is left, or there are no frames.
        """
        if not len(scores):
            return None
        scores = np.require(scores, np.float32, ["C", "W"])
        widths = float(options.beam), int(options.max_active), float(options.lattice_beam)
        alive, begins, states, silent, spoken = search(self._graph, scores, *widths, _BLOCK)
        if not alive:
            return None
        complete, frames, finals, sources, targets, pdfs, words, costs, acoustic = assemble(
            self._graph, scores, begins, states, silent, spoken
        )
        return Lattice(frames, finals, sources, targets, pdfs, words, costs, acoustic, complete)


_WORK = 3_000_000
"""Arcs that are looked at for one utterance, some seconds; the sentences found by then are the best ones.
If there is none, the best path is followed directly."""


@cache
def compile_search() -> None:
    """Compile the search, or read what another process on this machine has compiled."""
    with one_compiles(search):
        loop = from_arcs(0, np.zeros(1, dtype=np.float32), np.zeros(1), arc_records([1], [1], [0.0], [0]))
        lattice = LatticeSearch(loop)(np.zeros((2, 1), dtype=np.float32), LatticeOptions(1.0, 1, 1.0))
        assert lattice is not None
        best_paths(lattice, 1, 1.0)


@dataclass(frozen=True)
class LatticePath:
    """A word sequence and the best path that puts it out.

    Attributes:
        words: Numbers of the words in the graph.
        starts: For each word the frame at which the path puts it out.
        pdfs: int32 `[T]`, the tied state of each frame.
        graph: Cost of the graph: language model, pronunciations, transitions.
        acoustic: Scaled negative log likelihood.
    """

    words: tuple[int, ...]
    starts: tuple[int, ...]
    pdfs: NDArray[np.int32]
    graph: float
    acoustic: float

    @property
    def cost(self) -> float:
        """Cost of the path."""
        return self.graph + self.acoustic


def best_paths(lattice: Lattice, limit: int, beam: float) -> list[LatticePath]:
    """The best paths of different word sequences, the best first.

    Args:
        lattice: The lattice.
        limit: Most paths.
        beam: Paths with a cost this much above the best one's are left out; a lattice's own beam makes the list exact.
    """
    arcs = lattice.arcs()
    chosen, begins = best_sentences(arcs, limit, float(beam), _WORK)
    if len(begins) == 1:
        return [_path(lattice, _best_arcs(lattice, arcs))]
    return [_path(lattice, chosen[begin:end]) for begin, end in pairwise(begins.tolist())]


def _best_arcs(lattice: Lattice, arcs: Arcs) -> _Places:
    """The best path of all, for lattices so large that the work ends before any sentence does."""
    chosen: list[int] = []
    state = 0
    while arcs.remaining[state] < lattice.finals[state]:
        leaving = slice(arcs.first[state], arcs.first[state + 1])
        rest = arcs.costs[leaving] + arcs.remaining[arcs.targets[leaving]]
        chosen.append(int(leaving.start + rest.argmin()))
        state = int(arcs.targets[chosen[-1]])
    return np.array(chosen, dtype=np.int64)


def _path(lattice: Lattice, arcs: _Places) -> LatticePath:
    """The path over some arcs, in order."""
    last = lattice.targets[arcs[-1]]
    words, pdfs = lattice.words[arcs], lattice.pdfs[arcs]
    spoken = words > 0
    return LatticePath(
        words=tuple(words[spoken].tolist()),
        starts=tuple(lattice.frames[lattice.sources[arcs[spoken]]].tolist()),
        pdfs=pdfs[pdfs >= 0],
        graph=float(lattice.graph[arcs].sum() + lattice.finals[last]),
        acoustic=float(lattice.acoustic[arcs].sum()),
    )
