"""Training graphs: all pronunciations of a transcript, as phones in context.

A graph is made from the transcript and a lexicon alone: pronunciation variants in parallel, optional silence between
words, before the first and after the last. Each node is a phone with its left and right neighbour; it depends neither
on the tree nor on the model, so it is made once and kept in a few kilobytes. `StateGraph` adds a model's states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speech.hmm.topology import NOISE, SILENCE, Floats, Ints, PhoneSet, Scales, TransitionModel
from speech.hmm.tree import DecisionTree

Lexicon = Mapping[str, Sequence[Sequence[str]]]
"""The pronunciations of each word, phones by name."""

NO_WORD = -1


@dataclass(frozen=True)
class GraphOptions:
    """Probabilities of pronunciations and silence.

    Attributes:
        silence_probability: Of silence between two words, before the first and after the last.
        pronunciations: Probabilities of pronunciations (word, phones); 1 for those not listed.
        silence_after: Probabilities of silence after single words; `silence_probability` for those not listed.
    """

    silence_probability: float = 0.5
    pronunciations: Mapping[tuple[str, tuple[str, ...]], float] | None = None
    silence_after: Mapping[str, float] | None = None

    def cost(self, word: str, phones: Sequence[str]) -> float:
        """Negative log probability of a pronunciation."""
        known = self.pronunciations or {}
        return -math.log(known.get((word, tuple(phones)), 1.0))

    def pause_costs(self, word: str | None) -> tuple[float, float]:
        """Negative log probabilities of silence after a word (None: before the first one), and of no silence."""
        known = self.silence_after or {}
        probability = self.silence_probability if word is None else known.get(word, self.silence_probability)
        return -math.log(probability), -math.log1p(-probability)


@dataclass(frozen=True)
class UtteranceGraph:
    """An acyclic graph of phones in context.

    Attributes:
        contexts: int16 `[E, 3]`, left phone, phone and right phone of each node; nodes are in topological order.
        words: int16 `[E]`, which word of the transcript a node belongs to, or NO_WORD.
        edges: int16 `[A, 2]`, pairs of nodes; -1 as the first is the beginning, -1 as the second the end.
        costs: float32 `[A]`, negative log probabilities.
    """

    contexts: NDArray[np.int16]
    words: NDArray[np.int16]
    edges: NDArray[np.int16]
    costs: NDArray[np.float32]


class _Sausage:
    """Phones of a transcript before their contexts are known."""

    def __init__(self) -> None:
        self.phones: list[int] = []
        self.words: list[int] = []
        self.after: list[list[tuple[int, float]]] = []  # of each node, those that follow; -1 is the end
        self.first: list[tuple[int, float]] = []

    def add(self, phone: int, word: int, before: Sequence[tuple[int, float]]) -> int:
        """A node that follows others, at their costs; -1 is the beginning."""
        node = len(self.phones)
        self.phones.append(phone)
        self.words.append(word)
        self.after.append([])
        for previous, cost in before:
            (self.first if previous < 0 else self.after[previous]).append((node, cost))
        return node


def _sausage(phones: PhoneSet, lexicon: Lexicon, words: Sequence[str], options: GraphOptions) -> _Sausage:
    graph = _Sausage()
    ends = [-1]
    for number in range(len(words) + 1):
        silence, direct = options.pause_costs(words[number - 1] if number else None)
        pause = graph.add(phones.number(SILENCE), NO_WORD, [(end, silence) for end in ends])
        before = [*((end, direct) for end in ends if words), (pause, 0.0)]
        if number == len(words):
            for node, cost in before:
                if node >= 0:
                    graph.after[node].append((-1, cost))
            break
        word, ends = words[number], []
        for pronunciation in lexicon.get(word) or [(NOISE,)]:
            cost, last = options.cost(word, pronunciation), -1
            for place, phone in enumerate(phones.numbers(pronunciation)):
                links = [(node, before_word + cost) for node, before_word in before] if place == 0 else [(last, 0.0)]
                last = graph.add(phone, number, links)
            ends.append(last)
    return graph


def utterance_graph(
    phones: PhoneSet, lexicon: Lexicon, words: Sequence[str], options: GraphOptions | None = None, context: bool = True
) -> UtteranceGraph:
    """All pronunciations of a transcript.

    Args:
        phones: The phone set.
        lexicon: Pronunciations; a word that it lacks is spoken noise.
        words: The transcript.
        options: Silence and pronunciation probabilities.
        context: Tell phones in different contexts apart; without, the contexts of neighbours are 0.

    Returns:
        The graph.
    """
    sausage = _sausage(phones, lexicon, words, options or GraphOptions())
    if not context:
        return _plain(sausage)
    numbers = [phone if phone > phones.noises else 0 for phone in sausage.phones]
    lefts: list[set[int]] = [set() for _ in numbers]
    rights: list[set[int]] = [set() for _ in numbers]
    for node, _ in sausage.first:
        lefts[node].add(0)
    for node, following in enumerate(sausage.after):
        for other, _ in following:
            rights[node].add(sausage.phones[other] if other >= 0 else 0)
            if other >= 0:
                lefts[other].add(sausage.phones[node])
    return _expanded(sausage, numbers, lefts, rights)


def _plain(sausage: _Sausage) -> UtteranceGraph:
    edges = [(-1, node, cost) for node, cost in sausage.first]
    edges += [(node, other, cost) for node, following in enumerate(sausage.after) for other, cost in following]
    return _packed([(0, phone, 0) for phone in sausage.phones], sausage.words, edges)


def _expanded(
    sausage: _Sausage, spoken: Sequence[int], lefts: Sequence[set[int]], rights: Sequence[set[int]]
) -> UtteranceGraph:
    """One copy of a node for each pair of neighbours; noises, which know no context, stay one."""
    contexts: list[tuple[int, int, int]] = []
    words: list[int] = []
    copies: list[dict[tuple[int, int], int]] = []
    for node, phone in enumerate(sausage.phones):
        pairs = [(a, b) for a in sorted(lefts[node]) for b in sorted(rights[node])] if spoken[node] else [(0, 0)]
        copies.append({pair: len(contexts) + i for i, pair in enumerate(pairs)})
        contexts += [(left, phone, right) for left, right in pairs]
        words += [sausage.words[node]] * len(pairs)
    edges: list[tuple[int, int, float]] = []
    everywhere = [*((-1, node, cost) for node, cost in sausage.first)]
    everywhere += [(node, other, cost) for node, following in enumerate(sausage.after) for other, cost in following]
    for node, other, cost in everywhere:
        right = sausage.phones[other] if other >= 0 else 0
        left = sausage.phones[node] if node >= 0 else 0
        sources = [-1] if node < 0 else _matching(copies[node], 1, right if spoken[node] else 0)
        targets = [-1] if other < 0 else _matching(copies[other], 0, left if spoken[other] else 0)
        edges += [(source, target, cost) for source in sources for target in targets]
    return _packed(contexts, words, edges)


def _matching(copies: Mapping[tuple[int, int], int], side: int, phone: int) -> list[int]:
    return [number for pair, number in copies.items() if pair[side] == phone]


def _packed(
    contexts: Sequence[tuple[int, int, int]], words: Sequence[int], edges: Sequence[tuple[int, int, float]]
) -> UtteranceGraph:
    if len(contexts) > np.iinfo(np.int16).max:
        raise ValueError(f"a transcript of {len(contexts)} phones is too long for one utterance: cut it into pieces")
    return UtteranceGraph(
        np.array(contexts, dtype=np.int16).reshape(-1, 3),
        np.array(words, dtype=np.int16),
        np.array([edge[:2] for edge in edges], dtype=np.int16).reshape(-1, 2),
        np.array([edge[2] for edge in edges], dtype=np.float32),
    )


@dataclass(frozen=True)
class StateGraph:
    """The states of an utterance graph under a model, ready for the Viterbi algorithm.

    State 0 is the beginning, which emits nothing; the arcs that enter a state other than its own loop lie together.

    Attributes:
        nodes: int32 `[S]`, the graph's node that each state belongs to (-1 for state 0).
        states: int32 `[S]`, which of its phone's states it is.
        pdfs: int32 `[S]`.
        loops: float32 `[S]`, log probability of staying.
        sources: int32 `[A]`, where each arc comes from, arcs sorted by where they lead.
        weights: float32 `[A]`, log probabilities.
        starts: int64 `[S + 1]`, the first arc that enters each state.
        finals: float32 `[S]`, log probability of ending.
        lowest: int64 `[S]`, the lowest state that this or any later one leads to.
        highest: int64 `[S]`, the highest state that this or any earlier one leads to.
    """

    nodes: Ints
    states: Ints
    pdfs: Ints
    loops: NDArray[np.float32]
    sources: Ints
    weights: NDArray[np.float32]
    starts: NDArray[np.int64]
    finals: NDArray[np.float32]
    lowest: NDArray[np.int64]
    highest: NDArray[np.int64]


def state_graph(
    graph: UtteranceGraph, tree: DecisionTree, transitions: TransitionModel, scales: Scales | None = None
) -> StateGraph:
    """Put a model's states into an utterance graph."""
    log_probs = transitions.weights(scales or Scales())
    contexts = graph.contexts.astype(np.int32)
    table = tree.pdfs(contexts)
    counts = (table >= 0).sum(1)
    bases = np.concatenate([[1], 1 + np.cumsum(counts)]).astype(np.int64)
    nodes = np.repeat(np.arange(len(contexts), dtype=np.int32), counts)
    states = (np.arange(len(nodes)) - (bases[:-1] - 1)[nodes]).astype(np.int32)
    pdfs = table[nodes, states]
    owners = transitions.states_of(contexts[nodes, 1], states, pdfs)
    inner = _inner_arcs(owners, states, transitions, log_probs)
    outer, finals = _outer_arcs(graph, bases, owners, counts, transitions, log_probs)
    source, target, weight = (np.concatenate(pair) for pair in zip(inner, outer, strict=True))
    loops = log_probs[transitions.loops[owners]]
    return _sorted_graph(nodes, states, pdfs, loops, source, target, weight, finals)


Arcs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def _inner_arcs(owners: Ints, states: Ints, transitions: TransitionModel, log_probs: Floats) -> Arcs:
    """Arcs between the states of a node, loops left out."""
    counts = np.diff(transitions.offsets)[owners]
    source = np.repeat(np.arange(len(owners)), counts)
    rank = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    moves = transitions.offsets[owners][source] + rank
    target_state = transitions.destinations[moves]
    sizes = transitions.num_states[owners][source]
    kept = (target_state != states[source]) & (target_state < sizes)
    source, moves, target_state = source[kept], moves[kept], target_state[kept]
    return source + 1, source + 1 + target_state - states[source], log_probs[moves]


def _outer_arcs(
    graph: UtteranceGraph,
    bases: NDArray[np.int64],
    owners: Ints,
    counts: NDArray[np.int64],
    transitions: TransitionModel,
    log_probs: Floats,
) -> tuple[Arcs, NDArray[np.float64]]:
    """Arcs from the last state of a node to the first one of the next, and the weights of ending."""
    first, second = graph.edges[:, 0].astype(np.int64), graph.edges[:, 1].astype(np.int64)
    known = np.maximum(first, 0)  # what this gives for the beginning is replaced below
    ends = bases[known] + counts[known] - 1
    exits = transitions.transition(owners[ends - 1], counts[known].astype(np.int32))
    weight = -graph.costs.astype(np.float64) + np.where(first < 0, 0.0, log_probs[exits])
    ends = np.where(first < 0, 0, ends)
    finals = np.full(bases[-1], -np.inf)
    np.maximum.at(finals, ends[second < 0], weight[second < 0])
    going = second >= 0
    return (ends[going], bases[:-1][second[going]], weight[going]), finals


def _sorted_graph(
    nodes: Ints,
    states: Ints,
    pdfs: Ints,
    loops: NDArray[np.float64],
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    weight: NDArray[np.float64],
    finals: NDArray[np.float64],
) -> StateGraph:
    # an arc that is never taken enters state 0, so that every state is entered
    source, target = np.concatenate([[0], source]), np.concatenate([[0], target])
    weight = np.concatenate([[-np.inf], weight])
    size = len(nodes) + 1
    lowest, highest = np.arange(size), np.arange(size)
    np.minimum.at(lowest, source, target)
    np.maximum.at(highest, source, target)
    lowest[0] = 1  # nothing stays at the beginning
    order = np.argsort(target, kind="stable")
    starts = np.searchsorted(target[order], np.arange(size + 1)).astype(np.int64)
    front = np.array([-1], dtype=np.int32)
    return StateGraph(
        np.concatenate([front, nodes]),
        np.concatenate([front, states]),
        np.concatenate([front + 1, pdfs]),
        np.concatenate([[-np.inf], loops]).astype(np.float32),
        source[order].astype(np.int32),
        weight[order].astype(np.float32),
        starts,
        finals.astype(np.float32),
        np.minimum.accumulate(lowest[::-1])[::-1],
        np.maximum.accumulate(highest),
    )
