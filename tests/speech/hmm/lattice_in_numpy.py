"""The lattice search as it was before numba compiled it: numpy for a frame's arcs, Python for sentences.

Slow, but short: the reference that compiled code is compared with, bit by bit, in tests and in
`benchmarks/graph_decoding.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speech.hmm.fst_arrays import FstArrays
from speech.hmm.lattice import Lattice, LatticeOptions, LatticePath

_Floats = NDArray[np.float64]
_Places = NDArray[np.int64]
_BLOCK = 100
"""Frames after which arcs that are far from every surviving path are dropped, to save memory."""


@dataclass(frozen=True)
class _Arcs:
    """Arcs of one sort by the state that they leave."""

    first: _Places
    """`[S + 1]`, the number of each state's first arc."""
    having: NDArray[np.bool_]
    """`[S]`, whether a state has any: a table small enough for a processor's cache."""
    pdfs: NDArray[np.int32]
    words: NDArray[np.int32]
    weights: NDArray[np.float32]
    targets: NDArray[np.int32]

    @classmethod
    def of(cls, graph: FstArrays, chosen: NDArray[np.bool_]) -> _Arcs:
        """The chosen arcs of a graph."""
        arcs = graph.arcs[chosen]
        first = np.zeros(len(graph.finals) + 1, dtype=np.int64)
        np.cumsum(np.bincount(graph.sources[chosen], minlength=len(graph.finals)), out=first[1:])
        columns = (np.ascontiguousarray(arcs[name]) for name in ("ilabel", "olabel", "weight", "target"))
        labels, words, weights, targets = columns
        return cls(first, first[1:] > first[:-1], labels - 1, words, weights, targets)

    def leaving(self, states: _Places) -> tuple[_Places, _Places]:
        """All arcs that leave some states: for each the place of its state in the list, and its number."""
        having = np.flatnonzero(self.having[states])
        begin = self.first[states[having]]
        counts = self.first[states[having] + 1] - begin
        owners = np.repeat(having, counts)
        return owners, np.arange(len(owners)) + np.repeat(begin - (np.cumsum(counts) - counts), counts)

    def labels(self, links: _Links) -> tuple[NDArray[np.int32], _Floats]:
        """Words and costs of some arcs."""
        return self.words[links.arcs], self.weights[links.arcs].astype(np.float64)


@dataclass
class _Links:
    """Arcs between tokens, by their places in the frames' lists."""

    sources: _Places
    targets: _Places
    arcs: _Places

    def chosen(self, keep: NDArray[np.bool_]) -> _Links:
        """Some of them."""
        return _Links(self.sources[keep], self.targets[keep], self.arcs[keep])


_NONE = np.zeros(0, dtype=np.int64)


@dataclass
class _Frame:
    """Tokens after some frame: states of the graph that the search reached."""

    states: _Places
    costs: _Floats
    silent: _Links
    """Arcs inside this frame, which consume none."""
    spoken: _Links = field(default_factory=lambda: _Links(_NONE, _NONE, _NONE))
    """Arcs to the next frame."""


class LatticeSearch:
    """Searches a graph; several threads may call it.

    Args:
        graph: The decoding graph: input labels are pdf + 1.
    """

    def __init__(self, graph: FstArrays) -> None:
        emitting = graph.arcs["ilabel"] > 0
        self.start, self.finals = graph.start, graph.finals
        self.emitting, self.silent = _Arcs.of(graph, emitting), _Arcs.of(graph, ~emitting)

    def __call__(self, scores: NDArray[np.float32], options: LatticeOptions) -> Lattice | None:
        """The lattice of an utterance.

        Args:
            scores: Scaled log likelihoods `[T, P]`.
            options: Width of the search and of the lattice.

        Returns:
            The lattice; None if no path is left, or there are no frames.
        """
        return _Utterance(self, scores, options).lattice() if len(scores) else None


class _Utterance:
    """The search of one utterance."""

    def __init__(self, search: LatticeSearch, scores: NDArray[np.float32], options: LatticeOptions) -> None:
        self.search, self.scores, self.options = search, scores, options
        self.frames: list[_Frame] = []
        self.places = np.full(len(search.finals), -1, dtype=np.int64)  # of states among the current tokens

    def lattice(self) -> Lattice | None:
        start = np.array([self.search.start])
        self.frames.append(self._closed(start, np.zeros(1), self.options.beam))
        for number, row in enumerate(self.scores, 1):
            following = self._step(self.frames[-1], row)
            if following is None:
                return None
            self.frames.append(following)
            if number % _BLOCK == 0:
                self._prune(np.zeros(len(following.states)), number - _BLOCK)
        finals, complete = self._ends()
        ends = self.frames[-1].costs + finals
        self._prune(ends - ends.min(), 0)
        return self._assembled(self._ends()[0], complete)

    def _ends(self) -> tuple[_Floats, bool]:
        """Final costs of the last tokens, and whether any is final; if not, all are."""
        finals = self.search.finals[self.frames[-1].states].astype(np.float64)
        complete = bool(np.isfinite(finals).any())
        return (finals if complete else np.zeros(len(finals))), complete

    def _step(self, frame: _Frame, row: NDArray[np.float32]) -> _Frame | None:
        """Tokens after another frame; their arcs are added to the frame before."""
        limit = frame.costs.min() + self.options.beam
        if len(frame.costs) > self.options.max_active:
            limit = min(limit, np.partition(frame.costs, self.options.max_active - 1)[self.options.max_active - 1])
        alive = np.flatnonzero(frame.costs <= limit)
        owners, arcs = self.search.emitting.leaving(frame.states[alive])
        if len(arcs) == 0:
            return None
        costs = frame.costs[alive][owners] + self.search.emitting.weights[arcs] - row[self.search.emitting.pdfs[arcs]]
        cutoff = costs.min() + self.options.beam
        if not np.isfinite(cutoff):  # a frame in which no state is possible
            return None
        near = np.flatnonzero(costs <= cutoff)
        sources, arcs, costs = alive[owners[near]], arcs[near], costs[near]
        targets = self.search.emitting.targets[arcs].astype(np.int64)
        numbers = np.arange(len(targets))
        self.places[targets] = numbers
        states = targets[self.places[targets] == numbers]
        self.places[states] = np.arange(len(states))
        best, places = np.full(len(states), np.inf), self.places[targets]
        np.minimum.at(best, places, costs)
        self.places[states] = -1
        frame.spoken = _Links(sources, places, arcs)
        return self._closed(states, best, cutoff)

    def _closed(self, states: _Places, costs: _Floats, cutoff: float) -> _Frame:
        """The frame of some tokens and those that arcs without frames lead to."""
        places, silent = self.places, self.search.silent
        places[states] = np.arange(len(states))
        improved = np.arange(len(states))
        while len(improved):
            owners, arcs = silent.leaving(states[improved])
            reached = costs[improved[owners]] + silent.weights[arcs]
            targets = silent.targets[arcs[reached <= cutoff]].astype(np.int64)
            fresh = np.unique(targets[places[targets] < 0])
            places[fresh] = len(states) + np.arange(len(fresh))
            states = np.concatenate([states, fresh])
            costs = np.concatenate([costs, np.full(len(fresh), np.inf)])
            before = costs.copy()
            np.minimum.at(costs, places[targets], reached[reached <= cutoff])
            improved = np.flatnonzero(costs < before)
        sources, arcs = silent.leaving(states)
        near = costs[sources] + silent.weights[arcs] <= cutoff
        inside = _Links(sources[near], places[silent.targets[arcs[near]]], arcs[near])
        places[states] = -1
        return _Frame(states, costs, inside)

    def _prune(self, extra: _Floats, until: int) -> None:
        """Drop arcs and tokens that are only on paths outside the lattice beam, from the last frame backwards.

        Args:
            extra: For each token of the last frame, how much its best path's cost is above the best one's.
            until: Frames before this one are left alone if no token after them was dropped.
        """
        costs, places = _NONE.astype(np.float64), _NONE  # of the following frame's tokens, before any was dropped
        for number in range(len(self.frames) - 1, -1, -1):
            frame, links = self.frames[number], self.frames[number].spoken
            if number < len(self.frames) - 1:
                if number < until and (places >= 0).all():
                    return
                arcs, row = self.search.emitting, self.scores[number]
                added = arcs.weights[links.arcs] - row[arcs.pdfs[links.arcs]]
                above = extra[links.targets] + (frame.costs[links.sources] + added - costs[links.targets])
                extra = np.full(len(frame.states), np.inf)
                np.minimum.at(extra, links.sources, above)
                links = links.chosen(above <= self.options.lattice_beam)
            silent, extra = self._pruned_silent(frame, extra)
            keep = extra <= self.options.lattice_beam
            after, costs = places, frame.costs
            places = np.where(keep, np.cumsum(keep) - 1, -1)
            frame.states, frame.costs = frame.states[keep], frame.costs[keep]
            frame.spoken = _Links(places[links.sources], after[links.targets], links.arcs)
            frame.silent = _Links(places[silent.sources], places[silent.targets], silent.arcs)

    def _pruned_silent(self, frame: _Frame, extra: _Floats) -> tuple[_Links, _Floats]:
        """The arcs inside a frame that stay, and how much each token is above the best path, through them, too."""
        links = frame.silent
        added = frame.costs[links.sources] + self.search.silent.weights[links.arcs] - frame.costs[links.targets]
        while True:
            above = extra[links.targets] + added
            lowered = extra.copy()
            np.minimum.at(lowered, links.sources, above)
            if (lowered == extra).all():
                return links.chosen(above <= self.options.lattice_beam), extra
            extra = lowered

    def _assembled(self, finals: _Floats, complete: bool) -> Lattice:
        """One lattice from the frames' tokens and arcs."""
        frames, scores, search = self.frames, self.scores, self.search
        sizes = [len(frame.states) for frame in frames]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        numbers = [offset + _topological(frame) for offset, frame in zip(offsets, frames, strict=False)]
        parts: list[tuple[NDArray[Any], ...]] = []
        for time, frame in enumerate(frames):
            here, silent, spoken = numbers[time], frame.silent, frame.spoken
            none = np.full(len(silent.arcs), -1, dtype=np.int32)
            parts.append((here[silent.sources], here[silent.targets], none, *search.silent.labels(silent), 0.0 * none))
            if time < len(scores):
                pdfs = search.emitting.pdfs[spoken.arcs]
                likely = -scores[time][pdfs].astype(np.float64)
                after = numbers[time + 1][spoken.targets]
                parts.append((here[spoken.sources], after, pdfs, *search.emitting.labels(spoken), likely))
        sources, targets, pdfs, words, graph, acoustic = (np.concatenate(column) for column in zip(*parts, strict=True))
        ends = np.full(offsets[-1], np.inf)
        ends[numbers[-1]] = finals
        order = np.argsort(sources, kind="stable")
        return Lattice(
            frames=np.repeat(np.arange(len(frames), dtype=np.int32), sizes),
            finals=ends,
            sources=sources[order].astype(np.int32),
            targets=targets[order].astype(np.int32),
            pdfs=pdfs[order],
            words=words[order],
            graph=graph[order],
            acoustic=acoustic[order],
            complete=complete,
        )


def _topological(frame: _Frame) -> _Places:
    """The place of each of a frame's tokens in an order in which arcs without frames lead forward."""
    depth = np.zeros(len(frame.states), dtype=np.int64)
    for _ in range(len(depth)):
        deeper = depth.copy()
        np.maximum.at(deeper, frame.silent.targets, depth[frame.silent.sources] + 1)
        if (deeper == depth).all():
            break
        depth = deeper
    places = np.empty(len(depth), dtype=np.int64)
    places[np.argsort(depth, kind="stable")] = np.arange(len(depth))
    return places


_WORK = 3_000_000
"""Arcs that are looked at for one utterance, some seconds; the sentences found by then are the best ones.
If there is none, the best path is followed directly."""


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
        self.finals, self.remaining = lattice.finals.tolist(), self._remaining()
        self._steps: dict[tuple[tuple[int, float], ...], _Step] = {}
        self._work = 0

    def _remaining(self) -> list[float]:
        """The cost of the best way from each state to an end."""
        best = self.lattice.finals.tolist()
        for state in range(len(best) - 1, -1, -1):
            for arc in range(self.first[state], self.first[state + 1]):
                best[state] = min(best[state], self.costs[arc] + best[self.targets[arc]])
        return best

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
        key = tuple(sorted((state, round(cost * 1e7)) for state, (cost, _) in prefix.states.items()))
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
