"""The best word sequences of a lattice, each with its best path.

A lattice has many paths for one word sequence: other times, other pronunciations. The search goes over sequences. A
prefix of words stands for all lattice states that its paths lead to, each with the cost of the best such path; this is
determinization on words, made only where the search goes. Prefixes are taken in the order of their best completion,
which is known exactly, so that sentences come out in the order of their costs (A*, Soong and Huang 1991).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np
from numpy.typing import NDArray

from speech.hmm.lattice import Lattice

_DIGITS = 7
"""Prefixes whose states' costs differ from each other by the same, to this many digits, go on in the same way."""
_WORK = 3_000_000
"""Arcs that are looked at for one utterance, some seconds; the sentences found by then are the best ones.
If there is none, the best path is followed directly."""


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
    search = _Sentences(lattice, beam)
    return list(islice(search, limit)) or [search.best()]


@dataclass
class _Step:
    """What follows a prefix, relative to the cost of its best state."""

    back: dict[int, int]
    """The arc without a word over which each state is reached best."""
    end: tuple[float, int] | None
    """The best end: its cost and its state."""
    words: dict[int, dict[int, tuple[float, int]]]
    """By next word, the states after it with the cost and the arc that puts the word out."""
    routes: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """The arcs over which a state is reached best, the last one first, and the state where they begin."""

    def route(self, state: int, sources: NDArray[np.int32]) -> tuple[list[int], int]:
        """The route to a state, which is followed back once: sentences have most of their beginnings in common."""
        if state not in self.routes:
            arcs, here = list[int](), state
            while here in self.back:
                arcs.append(self.back[here])
                here = int(sources[arcs[-1]])
            self.routes[state] = arcs, here
        return self.routes[state]


@dataclass
class _Prefix:
    """A beginning of sentences."""

    before: _Prefix | None
    word: int
    cost: float
    """Of its best state."""
    states: dict[int, tuple[float, int]]
    """Relative costs, and the arcs that put the last word out."""
    step: _Step | None = None


class _Sentences:
    """Yields paths in the order of their costs."""

    def __init__(self, lattice: Lattice, beam: float) -> None:
        self.lattice, self.beam = lattice, beam
        self.first = np.searchsorted(lattice.sources, np.arange(len(lattice.finals) + 1)).tolist()
        self.targets, self.words = lattice.targets.tolist(), lattice.words.tolist()
        self.costs = (lattice.graph + lattice.acoustic).tolist()
        self.finals, self.remaining = lattice.finals.tolist(), lattice.remaining().tolist()
        self._steps: dict[tuple[tuple[int, float], ...], _Step] = {}
        self._work = 0

    def __iter__(self) -> Iterator[LatticePath]:
        numbers = count()
        limit = self.remaining[0] + self.beam
        begin = _Prefix(None, 0, 0.0, {0: (0.0, -1)})
        waiting: list[tuple[float, int, _Prefix, int]] = [(self.remaining[0], next(numbers), begin, -1)]
        while waiting and self._work < _WORK:
            _, _, prefix, end = heapq.heappop(waiting)
            if end >= 0:
                yield self._path(prefix, end)
                continue
            step = prefix.step = self._step(prefix, limit)
            if step.end is not None and prefix.cost + step.end[0] <= limit:
                heapq.heappush(waiting, (prefix.cost + step.end[0], next(numbers), prefix, step.end[1]))
            for word, states in step.words.items():
                total = prefix.cost + min(cost + self.remaining[state] for state, (cost, _) in states.items())
                if total <= limit:
                    best = min(cost for cost, _ in states.values())
                    relative = {state: (cost - best, arc) for state, (cost, arc) in states.items()}
                    longer = _Prefix(prefix, word, prefix.cost + best, relative)
                    heapq.heappush(waiting, (total, next(numbers), longer, -1))

    def _step(self, prefix: _Prefix, limit: float) -> _Step:
        """What follows a prefix, on paths up to a cost; the same for all prefixes with equal states and relative costs.

        The first of these prefixes costs least, so what leads above the limit from there does so from all.
        """
        key = tuple(sorted((state, round(cost, _DIGITS)) for state, (cost, _) in prefix.states.items()))
        if key not in self._steps:
            reached = {state: cost for state, (cost, _) in prefix.states.items()}
            self._steps[key] = self._followed(reached, limit - prefix.cost)
        return self._steps[key]

    def _followed(self, reached: dict[int, float], limit: float) -> _Step:
        """Follow arcs without a word from some states, in topological order, as far as the next words."""
        first, targets, costs, words, remaining = self.first, self.targets, self.costs, self.words, self.remaining
        step = _Step({}, None, {})
        waiting = list(reached)
        heapq.heapify(waiting)
        while waiting:
            state = heapq.heappop(waiting)
            here = reached[state]
            if self.finals[state] < np.inf and (step.end is None or here + self.finals[state] < step.end[0]):
                step.end = here + self.finals[state], state
            self._work += first[state + 1] - first[state]
            for arc in range(first[state], first[state + 1]):
                target, cost = targets[arc], here + costs[arc]
                if cost + remaining[target] > limit:
                    continue
                if word := words[arc]:
                    entries = step.words.setdefault(word, {})
                    if target not in entries or cost < entries[target][0]:
                        entries[target] = cost, arc
                elif target not in reached:
                    heapq.heappush(waiting, target)
                    reached[target], step.back[target] = cost, arc
                elif cost < reached[target]:
                    reached[target], step.back[target] = cost, arc
        return step

    def _path(self, prefix: _Prefix, state: int) -> LatticePath:
        """The best path of a sentence that ends in a state."""
        arcs: list[int] = []
        last, sources = state, self.lattice.sources
        here: _Prefix | None = prefix
        while here is not None:
            assert here.step is not None
            route, state = here.step.route(state, sources)
            arcs += route
            if here.before is not None:
                arcs.append(here.states[state][1])
                state = int(sources[arcs[-1]])
            here = here.before
        return self._of_arcs(arcs[::-1], last)

    def best(self) -> LatticePath:
        """The best path of all, for lattices so large that the work ends before any sentence does."""
        arcs: list[int] = []
        state = 0
        while self.remaining[state] < self.finals[state]:
            leaving = range(self.first[state], self.first[state + 1])
            arcs.append(min(leaving, key=lambda arc: self.costs[arc] + self.remaining[self.targets[arc]]))
            state = self.targets[arcs[-1]]
        return self._of_arcs(arcs, state)

    def _of_arcs(self, arcs: list[int], last: int) -> LatticePath:
        """The path over some arcs, in order, that ends in a state."""
        chosen = np.asarray(arcs, dtype=np.int64)
        spoken = chosen[self.lattice.words[chosen] > 0]
        pdfs = self.lattice.pdfs[chosen]
        return LatticePath(
            words=tuple(self.lattice.words[spoken].tolist()),
            starts=tuple(self.lattice.frames[self.lattice.sources[spoken]].tolist()),
            pdfs=pdfs[pdfs >= 0],
            graph=float(self.lattice.graph[chosen].sum() + self.lattice.finals[last]),
            acoustic=float(self.lattice.acoustic[chosen].sum()),
        )
