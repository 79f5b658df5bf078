"""Viterbi alignment of an utterance: the phone and HMM state of each frame.

`StatePath` has the phones of the best path and each frame's state within its phone. It does not depend on the decision
tree, so it can be used to train models with other trees. `StatePath.alignment` names words, phones and tied states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from speech.alignments import Alignment, Span
from speech.hmm.graphs import NO_WORD, StateGraph, UtteranceGraph, state_graph
from speech.hmm.model import HmmModel
from speech.hmm.topology import Floats, Ints, PhoneSet, Scales, TransitionModel
from speech.hmm.tree import DecisionTree

LogLikelihoods = NDArray[np.float32]
Likelihoods = Callable[[NDArray[np.int64]], LogLikelihoods]
"""Gives the log likelihoods `[T, n]` of n tied states in all frames of an utterance."""
_PRUNE = 3  # frames between two checks of the band's ends: a check costs as much as a step


@dataclass(frozen=True)
class AlignOptions:
    """Parameters of alignment.

    Attributes:
        beam: Of the Viterbi search, at the scale of the scaled log-likelihoods; 0 is none.
        retry_beam: Of a second try.
        acoustic_scale: Weight of the log-likelihoods.
        scales: Weights of the transitions.
    """

    beam: float = 10.0
    retry_beam: float = 40.0
    acoustic_scale: float = 0.1
    scales: Scales = field(default_factory=Scales)


@dataclass(frozen=True)
class StatePath:
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

    def alignment(
        self,
        name: str,
        words: Sequence[str],
        tree: DecisionTree,
        confidences: NDArray[np.float64] | None = None,
        frame_seconds: float = 0.01,
    ) -> Alignment:
        """The alignment of an utterance under a tree.

        Args:
            name: The utterance.
            words: Its transcript.
            tree: Of the model that aligned.
            confidences: Of each frame `[T]`, if known; those of words and phones are their means.
            frame_seconds: Frame shift in seconds.
        """

        def span(label: str, start: int, end: int) -> Span:
            return Span(label, start, end, None if confidences is None else float(confidences[start:end].mean()))

        names, starts = tree.phones.names, self.starts.tolist()
        phones = zip(self.phones.tolist(), starts[:-1], starts[1:], strict=True)
        return Alignment(
            name,
            tuple(span(words[number], start, end) for number, start, end in self.word_times()),
            tuple(span(names[phone - 1], start, end) for phone, start, end in phones),
            self.score,
            self.pdfs(tree).astype(np.int32),
            frame_seconds,
            duration=self.num_frames * frame_seconds,
        )


def transition_counts(path: StatePath, tree: DecisionTree, transitions: TransitionModel) -> Floats:
    """Number of times that each transition was taken: float64 `[number of transitions]`."""
    phones = path.phones.astype(np.int32)[path.phone_of_frame()]
    states = path.states.astype(np.int32)
    owners = transitions.states_of(phones, states, path.pdfs(tree))
    following = np.append(states[1:], 0)
    last = path.starts[1:] - 1
    following[last] = transitions.num_states[owners[last]]
    taken = transitions.transition(owners, following)
    return np.bincount(taken[taken >= 0], minlength=len(transitions.log_probs)).astype(np.float64)


def equal_path(graph: UtteranceGraph, num_frames: int, phones: PhoneSet) -> StatePath | None:
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
    return StatePath(graph.contexts[path, 1], graph.words[path], starts, states)


def _plain_path(graph: UtteranceGraph) -> list[int]:
    """Nodes of the path with silence at its ends and nowhere else."""
    following: dict[int, list[int]] = {}
    for source, target in graph.edges.tolist():
        following.setdefault(source, []).append(target)
    last = int(graph.words.max(initial=NO_WORD))
    node = min(following[-1])
    path = [node]
    while (after := following[node])[0] != -1 or len(after) > 1:
        spoken = [other for other in after if other >= 0 and graph.words[other] != NO_WORD]
        pauses = [other for other in after if other >= 0 and graph.words[other] == NO_WORD]
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


def path_of_states(graph: UtteranceGraph, states: StateGraph, path: Ints, score: float = 0.0) -> StatePath:
    """The phones along a path, from the state of each frame."""
    nodes = states.nodes[path]
    starts = np.flatnonzero(np.diff(nodes, prepend=-2))
    chosen = nodes[starts]
    return StatePath(
        graph.contexts[chosen, 1],
        graph.words[chosen],
        np.append(starts, len(path)).astype(np.int32),
        states.states[path].astype(np.int8),
        score,
    )


def align_frames(
    model: HmmModel, graph: UtteranceGraph, likelihoods: Likelihoods, options: AlignOptions
) -> tuple[StatePath | None, bool]:
    """Align an utterance.

    Args:
        model: Tree and transitions; the likelihoods may come from elsewhere.
        graph: Of the transcript.
        likelihoods: Gives the log likelihoods `[T, n]` of n tied states.
        options: Beams and scales.

    Returns:
        The path, None if none within the beams reaches the end; and whether the wider beam was needed.
    """
    states = state_graph(graph, model.tree, model.transitions, options.scales)
    used, columns = np.unique(states.pdfs, return_inverse=True)
    scaled = np.float32(options.acoustic_scale) * likelihoods(used.astype(np.int64))
    path = viterbi(states, scaled, columns.astype(np.int32), options.beam or math.inf)
    again = path is None and options.beam > 0
    if again:
        path = viterbi(states, scaled, columns.astype(np.int32), options.retry_beam or math.inf)
    if path is None:
        return None, again
    score = float(scaled[np.arange(len(path)), columns[path]].mean())
    return path_of_states(graph, states, path, score), again


def no_path(frames: int) -> str:
    """Failure message for an utterance with this many frames."""
    return f"no path of its transcript through {frames} frames within the beam"


def concatenated_contexts(paths: Sequence[StatePath]) -> Ints:
    """Left phone, phone, right phone and state of all frames of some utterances: int32 `[ΣT, 4]`."""
    rows = []
    for path in paths:
        contexts = path.contexts()[path.phone_of_frame()]
        rows.append(np.concatenate([contexts, path.states[:, None].astype(np.int32)], axis=1))
    return np.concatenate(rows)
