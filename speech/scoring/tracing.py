"""Alignment of texts with alternatives, optional words and fragments: sclite's, on networks of words.

The costs and the choice among equally good steps are those of `speech.scoring.align`, with a cell for each pair of
arcs instead of each pair of words. An optional word costs 2 if it is left out, the missing word `@` costs 0.001.
sclite adds costs in single precision, which decides some ties, so this module does, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speech.scoring.align import DELETION_COST, INSERTION_COST, SUBSTITUTION_COST, Operation, Step, align, check_cells
from speech.scoring.network import NULL, START, Arc, Network, ScoringRules, parse_network

OPTIONAL_COST = 2  # sclite's weights of a deleted optional word and of a missing word
NULL_COST = 0.001

_MOST_CELLS = 1 << 23
"""Largest table: a cell takes some 300 bytes and ten microseconds."""
_single = np.float32
_Cell = tuple[int, int]


class TraceStep(NamedTuple):
    """A step of an alignment of two networks."""

    operation: Operation | None
    """None if a missing word (`@`) is passed, which counts nothing."""
    ref: Arc | None
    hyp: Arc | None

    @property
    def error(self) -> bool:
        """Whether the step is a word error."""
        return self.operation not in (None, "cor")

    @property
    def written(self) -> Step:
        """The step with the words as written."""
        assert self.operation is not None
        return self.operation, self.ref.word if self.ref else None, self.hyp.word if self.hyp else None


def trace(ref: str, hyp: str, rules: ScoringRules) -> list[TraceStep]:
    """Aligns a hypothesis with its reference, each read as a network.

    Raises:
        MarkupError: A text's alternatives cannot be read.
        TextTooLongError: The texts are too long to be aligned.
    """
    ref_net, hyp_net = parse_network(ref, rules), parse_network(hyp, rules)
    if ref_net.linear and hyp_net.linear and not rules.fragments:
        return _trace_words(ref_net.arcs, hyp_net.arcs)
    check_cells(len(ref_net.arcs), len(hyp_net.arcs), _MOST_CELLS)
    return _Aligner(ref_net, hyp_net, rules).trace()


def align_texts(ref: str, hyp: str, rules: ScoringRules) -> list[Step]:
    """Aligns a hypothesis with its reference, and returns the steps as `align` does.

    The words are those of the readings that fit best. An optional word that is left out is correct: a step "cor" with
    one word.

    Raises:
        MarkupError: A text's alternatives cannot be read.
        TextTooLongError: The texts are too long to be aligned.
    """
    if not rules.reads_marks(ref) and not rules.reads_marks(hyp):
        return align(rules.fold(ref).split(), rules.fold(hyp).split())
    return [step.written for step in trace(ref, hyp, rules) if step.operation is not None]


def _trace_words(ref: Sequence[Arc], hyp: Sequence[Arc]) -> list[TraceStep]:
    refs, hyps = iter(ref), iter(hyp)
    steps = align([arc.word for arc in ref], [arc.word for arc in hyp])
    return [
        TraceStep(operation, next(refs) if ref_word is not None else None, next(hyps) if hyp_word is not None else None)
        for operation, ref_word, hyp_word in steps
    ]


class _Aligner:
    """The table of an alignment: for each pair of last arcs, the least cost, the step, and the cell before it."""

    def __init__(self, ref: Network, hyp: Network, rules: ScoringRules) -> None:
        self.ref, self.hyp, self.rules = ref, hyp, rules
        # whole numbers need no rounding, and Python's are faster
        self.exact = all(arc.word != NULL for arc in (*ref.arcs, *hyp.arcs))
        self.costs: dict[_Cell, float] = {(START, START): self._rounded(0)}
        self.back: dict[_Cell, tuple[Operation, _Cell]] = {}

    def trace(self) -> list[TraceStep]:
        for row in range(START, len(self.ref.arcs)):
            for column in range(START, len(self.hyp.arcs)):
                if (row, column) != (START, START):
                    self._fill(row, column)
        cell = self._cheapest([(row, column) for row in self.ref.last for column in self.hyp.last])
        steps = []
        while cell != (START, START):
            operation, before = self.back[cell]
            steps.append(self._step(operation, cell))
            cell = before
        return steps[::-1]

    def _fill(self, row: int, column: int) -> None:
        """Chooses the step into a cell: the diagonal unless another is cheaper, else the insertion unless it is."""
        ref = self.ref.arcs[row] if row != START else None
        hyp = self.hyp.arcs[column] if column != START else None
        ways: dict[Operation, tuple[float, _Cell]] = {}
        if ref and hyp:
            cost = 0 if self.rules.equal(ref, hyp) else SUBSTITUTION_COST
            ways["sub"] = self._best([(r, h) for r in ref.before for h in hyp.before], cost)
        if hyp:
            ways["ins"] = self._best([(row, h) for h in hyp.before], _skip_cost(hyp, INSERTION_COST))
        if ref:
            ways["del"] = self._best([(r, column) for r in ref.before], _skip_cost(ref, DELETION_COST))
        # min takes the first of equals, so the order of the entries matters
        chosen = min(ways, key=lambda name: ways[name][0])
        self.costs[row, column] = ways[chosen][0]
        self.back[row, column] = chosen, ways[chosen][1]

    def _best(self, cells: list[_Cell], cost: float) -> tuple[float, _Cell]:
        before = self._cheapest(cells)
        return self._rounded(self.costs[before] + self._rounded(cost)), before

    def _cheapest(self, cells: list[_Cell]) -> _Cell:
        return min(cells, key=self.costs.__getitem__)

    def _rounded(self, cost: float) -> float:
        return cost if self.exact else _single(cost)  # type: ignore[return-value]

    def _step(self, operation: Operation, cell: _Cell) -> TraceStep:
        ref = self.ref.arcs[cell[0]] if operation != "ins" else None
        hyp = self.hyp.arcs[cell[1]] if operation != "del" else None
        if ref and hyp:
            return TraceStep("cor" if self.rules.equal(ref, hyp) else "sub", ref, hyp)
        single = ref or hyp
        assert single is not None
        return TraceStep(None if single.null else "cor" if single.optional else operation, ref, hyp)


def _skip_cost(arc: Arc, cost: int) -> float:
    return NULL_COST if arc.null else OPTIONAL_COST if arc.optional else cost
