"""The matched-pairs sentence-segment word error test of two systems, as NIST's sc_stats does it (mapsswe).

Errors of neighbouring words depend on each other, those on either side of words that both systems recognize hardly do.
So each utterance is cut where both systems have two or more words right in a row; each stretch with errors between
such places is a segment. The test asks whether the mean difference of errors per segment is zero (Gillick and Cox,
ICASSP 1989).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from speech.scoring.bootstrap import matched_pair_p_value
from speech.scoring.counts import ScoreReport, ScoringError, UtteranceScore
from speech.scoring.tracing import TraceStep, trace

BOUNDARY_WORDS = 2
"""Words in a row that both systems have right, which end a segment."""

_Pair = tuple[int, int]


@dataclass(frozen=True)
class MatchedPairs:
    """Comparison of two systems, A and B, over segments."""

    segments: int
    """Segments in which at least one system has an error."""
    mean: float
    """Mean difference of word errors in a segment, those of A minus those of B."""
    deviation: float
    """Standard deviation of the difference."""
    z: float | None
    """Test statistic, normally distributed if the systems are equally good; None if the deviation is 0."""
    p_value: float
    """Two-sided probability of such a difference between equally good systems."""
    better: Literal["a", "b"] | None
    """The better system if the difference is significant (p < 0.05), else None."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value."""
        return asdict(self)


def matched_pairs(a: ScoreReport, b: ScoreReport, *, level: float = 0.95) -> MatchedPairs:
    """Tests whether one of two systems is better on the same utterances.

    Args:
        a: Scores of system A.
        b: Scores of system B on the same references, by the same rules.
        level: 1 minus the significance level.

    Raises:
        ScoringError: The systems have different utterances or references.
    """
    others = {utterance.id: utterance for utterance in b.utterances}
    if different := sorted({utterance.id for utterance in a.utterances} ^ others.keys()):
        raise ScoringError(f"{len(different)} utterance(s) are of one system only, such as {different[0]!r}")
    pairs = [pair for utterance in a.utterances for pair in error_segments(utterance, others[utterance.id])]
    errors_a, errors_b = (np.array([pair[k] for pair in pairs], dtype=np.int64) for k in (0, 1))
    differences = errors_a - errors_b
    mean = float(differences.mean()) if pairs else 0.0
    deviation = float(differences.std(ddof=1)) if len(pairs) > 1 else 0.0
    z = mean / (deviation / math.sqrt(len(pairs))) if deviation else None
    p_value = matched_pair_p_value(errors_a, errors_b)
    better: Literal["a", "b"] | None = None
    if p_value < 1 - level:
        better = "b" if mean > 0 else "a"
    return MatchedPairs(len(pairs), mean, deviation, z, p_value, better)


def error_segments(a: UtteranceScore, b: UtteranceScore) -> list[_Pair]:
    """Word errors of two systems in each segment of an utterance.

    Raises:
        ScoringError: The references differ.
    """
    if a.ref != b.ref:
        raise ScoringError(f"utterance {a.id!r} has another reference for the second system: score both on the same")
    if a.counts.errors == 0 and b.counts.errors == 0:
        return []
    segments: list[_Pair] = []
    current, correct = (0, 0), 0
    for errors, words in _places(a, b):
        if any(errors):
            current, correct = (current[0] + errors[0], current[1] + errors[1]), 0
            continue
        correct += words
        if correct >= BOUNDARY_WORDS and any(current):
            segments.append(current)
            current = (0, 0)
    return [*segments, current] if any(current) else segments


def _places(a: UtteranceScore, b: UtteranceScore) -> Iterator[tuple[_Pair, int]]:
    """Goes through the places of a reference that both alignments pass: errors of both systems, and words.

    A place is a node of the reference's network with what is inserted there, or the words between two nodes: one word,
    or a choice of alternatives where the systems differ.
    """
    parts_a, parts_b = _by_node(a), _by_node(b)
    nodes = [node for node in parts_a if node in parts_b]
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        inserted = (_errors(parts_a[node].inserted), _errors(parts_b[node].inserted))
        if any(inserted):
            yield inserted, 0
        if after is not None:
            steps = _between(parts_a, node, after), _between(parts_b, node, after)
            words = min(
                sum(step.ref is not None and not step.ref.null for step in steps_of_system) for steps_of_system in steps
            )
            yield (_errors(steps[0]), _errors(steps[1])), words


@dataclass
class _Part:
    """What an alignment does at a node of the reference, and with the arc that it takes from there."""

    inserted: list[TraceStep]
    taken: TraceStep | None = None


def _by_node(utterance: UtteranceScore) -> dict[int, _Part]:
    """Parts of an alignment by node, in order."""
    node, parts = 0, {0: _Part([])}
    for step in trace(utterance.ref, utterance.hyp, utterance.rules):
        if step.ref is None:
            parts[node].inserted.append(step)
        else:
            parts[node].taken = step
            node = step.ref.end
            parts[node] = _Part([])
    return parts


def _between(parts: dict[int, _Part], start: int, end: int) -> list[TraceStep]:
    """Steps after the insertions at one node and before those at another."""
    steps: list[TraceStep] = []
    node = start
    while True:
        taken = parts[node].taken
        assert taken is not None
        assert taken.ref is not None
        steps.append(taken)
        node = taken.ref.end
        if node == end:
            return steps
        steps += parts[node].inserted


def _errors(steps: list[TraceStep]) -> int:
    return sum(step.error for step in steps)
