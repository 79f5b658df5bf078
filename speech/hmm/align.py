"""Viterbi alignment: the phone and HMM state of each frame.

`Alignment` has the phones of the best path and each frame's state within its phone. It does not depend on the decision
tree, so it can be used to train models with other trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speech.hmm.graphs import NO_WORD, StateGraph, UtteranceGraph
from speech.hmm.topology import Floats, Ints, PhoneSet, TransitionModel
from speech.hmm.tree import DecisionTree

LogLikelihoods = NDArray[np.float32]
_PRUNE = 3  # frames between two checks of the band's ends: a check costs as much as a step


@dataclass(frozen=True)
class Alignment:
    """The best path of an utterance.

    Attributes:
        phones: int16 `[M]`, the phones in order.
        words: int16 `[M]`, which word of the transcript each belongs to, or NO_WORD.
        starts: int32 `[M + 1]`, the first frame of each phone, and the number of frames.
        states: int8 `[T]`, each frame's state in its phone.
        score: Log likelihood of the path for a frame, acoustics scaled.
    """

    phones: NDArray[np.int16]
    words: NDArray[np.int16]
    starts: Ints
    states: NDArray[np.int8]
    score: float = 0.0

    def __post_init__(self) -> None:
        """Refuse arrays of a file that contradict each other."""
        count = len(self.phones)
        if not len(self.words) == count == len(self.starts) - 1 or (count and self.phones.min() < 1):
            raise ValueError(f"an alignment of {count} phones, some of them 0, or with other words or durations")
        ends = int(self.starts[0]) == 0 and int(self.starts[-1]) == len(self.states)
        if not ends or (np.diff(self.starts) < 1).any() or (len(self.states) and self.states.min() < 0):
            raise ValueError(f"an alignment of {len(self.states)} frames with phones that do not fill them")

    @property
    def num_frames(self) -> int:
        """Number of frames, T."""
        return len(self.states)

    def phone_of_frame(self) -> Ints:
        """Index of each frame's phone: `[T]`."""
        return np.repeat(np.arange(len(self.phones), dtype=np.int32), np.diff(self.starts))

    def contexts(self) -> Ints:
        """Left phone, phone and right phone of each phone: int32 `[M, 3]`, 0 beyond either end."""
        wide = np.concatenate([[0], self.phones, [0]]).astype(np.int32)
        return np.stack([wide[:-2], wide[1:-1], wide[2:]], axis=1)

    def pdfs(self, tree: DecisionTree) -> Ints:
        """Each frame's pdf under a tree: int32 `[T]`."""
        return tree.pdfs(self.contexts())[self.phone_of_frame(), self.states]

    def word_times(self) -> list[tuple[int, int, int]]:
        """Each word's number, first frame and the frame after its last."""
        times: dict[int, tuple[int, int]] = {}
        for word, start, end in zip(
            self.words.tolist(), self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True
        ):
            if word != NO_WORD:
                times[word] = (times.get(word, (start, end))[0], end)
        return [(word, start, end) for word, (start, end) in times.items()]


def transition_counts(alignment: Alignment, tree: DecisionTree, transitions: TransitionModel) -> Floats:
    """Number of times that each transition was taken: float64 `[number of transitions]`."""
    phones = alignment.phones.astype(np.int32)[alignment.phone_of_frame()]
    states = alignment.states.astype(np.int32)
    owners = transitions.states_of(phones, states, alignment.pdfs(tree))
    following = np.append(states[1:], 0)
    last = alignment.starts[1:] - 1
    following[last] = transitions.num_states[owners[last]]
    taken = transitions.transition(owners, following)
    return np.bincount(taken[taken >= 0], minlength=len(transitions.log_probs)).astype(np.float64)


def equal_alignment(graph: UtteranceGraph, num_frames: int, phones: PhoneSet) -> Alignment | None:
    """Frames divided evenly among the states of the transcript: first pronunciations, silence at the ends only.

    Returns:
        None if there are fewer frames than states.
    """
    path = _plain_path(graph)
    sizes = [phones.topology(int(graph.contexts[node, 1])).num_states for node in path]
    bounds = np.linspace(0, num_frames, sum(sizes) + 1).astype(np.int32)
    if num_frames < sum(sizes):
        return None
    states = np.repeat(np.concatenate([np.arange(size) for size in sizes]), np.diff(bounds)).astype(np.int8)
    starts = bounds[np.concatenate([[0], np.cumsum(sizes)])]
    return Alignment(graph.contexts[path, 1], graph.words[path], starts, states)


def _plain_path(graph: UtteranceGraph) -> list[int]:
    """Nodes of the path with silence at its ends and nowhere else."""
    following: dict[int, list[int]] = {}
    for source, target in graph.edges.tolist():
        following.setdefault(source, []).append(target)
    last = int(graph.words.max(initial=NO_WORD))
    node = min(following[-1])
    path = [node]
    while (after := following[node])[0] != -1 or len(after) > 1:
        spoken = [one for one in after if one >= 0 and graph.words[one] != NO_WORD]
        pauses = [one for one in after if one >= 0 and graph.words[one] == NO_WORD]
        node = min(pauses if graph.words[node] == last and pauses else spoken)
        path.append(node)
    return path


def viterbi(graph: StateGraph, log_likelihoods: LogLikelihoods, columns: Ints, beam: float = math.inf) -> Ints | None:
    """The most probable path through a graph (Viterbi 1967).

    States are in topological order, so the active ones form a band, which is computed at once. A beam narrows the
    band: states at its ends that are worse than the best by more than the beam are dropped. A path that stays within
    the beam is found as without one.

    Args:
        graph: States and arcs.
        log_likelihoods: float32 `[T, Q]`, scaled.
        columns: int `[S]`, the column of each state's pdf.
        beam: Width of the beam; infinite for the exact best path.

    Returns:
        int32 `[T]`, the state of each frame; None if no path within the beam reaches the end.
    """
    frames, size = len(log_likelihoods), len(graph.nodes)
    scores = np.full((frames + 1, size), -np.inf, dtype=np.float32)
    moved = np.zeros((frames, size), dtype=bool)
    scores[0, 0] = 0.0
    low, high = 0, 1
    sources, weights, starts, loops = graph.sources, graph.weights, graph.starts, graph.loops
    lowest, highest, firsts = graph.lowest.tolist(), graph.highest.tolist(), starts.tolist()
    for t in range(frames):
        before = scores[t]
        low, high = lowest[low], highest[high - 1] + 1
        first, last = firsts[low], firsts[high]
        arrived = before.take(sources[first:last])
        arrived += weights[first:last]
        best = np.maximum.reduceat(arrived, starts[low:high] - first, out=scores[t + 1, low:high])
        stayed = before[low:high] + loops[low:high]
        np.greater(best, stayed, out=moved[t, low:high])
        np.maximum(best, stayed, out=best)
        best += log_likelihoods[t].take(columns[low:high])
        if t % _PRUNE == 0 and beam < math.inf:
            alive = np.flatnonzero(best > np.maximum.reduce(best) - beam)
            if len(alive):
                low, high = low + int(alive[0]), low + int(alive[-1]) + 1
    return _traced(graph, scores, moved)


def _traced(graph: StateGraph, scores: LogLikelihoods, moved: NDArray[np.bool_]) -> Ints | None:
    """The best path, from its end to its beginning."""
    ends = scores[-1] + graph.finals
    state = int(ends.argmax())
    if len(moved) == 0 or not ends[state] > -np.inf:
        return None
    path = np.empty(len(moved), dtype=np.int32)
    for t in range(len(moved) - 1, -1, -1):
        path[t] = state
        if moved[t, state]:
            first, last = graph.starts[state], graph.starts[state + 1]
            sources = graph.sources[first:last]
            state = int(sources[(scores[t, sources] + graph.weights[first:last]).argmax()])
    assert state == 0, "a path that does not begin at the beginning"
    return path


def alignment_of_path(graph: UtteranceGraph, states: StateGraph, path: Ints, score: float = 0.0) -> Alignment:
    """The phones along a path."""
    nodes = states.nodes[path]
    starts = np.flatnonzero(np.diff(nodes, prepend=-2))
    chosen = nodes[starts]
    return Alignment(
        graph.contexts[chosen, 1],
        graph.words[chosen],
        np.append(starts, len(path)).astype(np.int32),
        states.states[path].astype(np.int8),
        score,
    )


def concatenated_contexts(alignments: Sequence[Alignment]) -> Ints:
    """Left phone, phone, right phone and state of all frames of some utterances: int32 `[ΣT, 4]`."""
    rows = []
    for alignment in alignments:
        contexts = alignment.contexts()[alignment.phone_of_frame()]
        rows.append(np.concatenate([contexts, alignment.states[:, None].astype(np.int32)], axis=1))
    return np.concatenate(rows)
