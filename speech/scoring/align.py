"""Word alignment by the rules of NIST's sclite, which reproduces its counts exactly.

A substitution costs 4, an insertion or a deletion 3: one substitution is preferred to a deletion plus an insertion, two
substitutions are not necessarily. If several alignments have the same cost, sclite's choice determines the number of
errors of each kind, and even their total: the diagonal step if neither other step is cheaper, else the deletion if it
is strictly cheaper than the insertion, else the insertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein

Operation = Literal["cor", "sub", "ins", "del"]
Step = tuple[Operation, str | None, str | None]

# sclite's weights: a substitution costs less than the insertion and the deletion that it stands for
SUBSTITUTION_COST = 4
INSERTION_COST = 3
DELETION_COST = 3

MOST_CELLS = 1 << 30
"""Largest table of an alignment, in bytes: of two texts of 32,768 words that have nothing in common."""
_DIAGONAL, _DELETION, _INSERTION = 0, 1, 2
_FEW_WORDS = 64
"""Hypotheses of at most this many words are aligned word by word, which is faster for them than arrays."""


class TextTooLongError(ValueError):
    """Two texts are too long to be aligned."""


def check_cells(ref_words: int, hyp_words: int, most: int) -> None:
    """Check that an alignment can be computed.

    Args:
        ref_words: Words of the reference.
        hyp_words: Words of the hypothesis.
        most: Largest product of the two.

    Raises:
        TextTooLongError: It is larger.
    """
    if ref_words * hyp_words > most:
        raise TextTooLongError(
            f"a reference of {ref_words:,} words and a hypothesis of {hyp_words:,} are too long to be aligned: score "
            "shorter utterances, or segments with times (stm and ctm)"
        )


def align(ref: Sequence[str], hyp: Sequence[str]) -> list[Step]:
    """Aligns a hypothesis with its reference.

    Args:
        ref: Reference words.
        hyp: Hypothesis words.

    Returns:
        Steps (operation, reference word, hypothesis word) from left to right; an absent word is None.

    Raises:
        TextTooLongError: The table of what differs would have more than `MOST_CELLS` cells.
    """
    # If the last words are equal, the diagonal step never costs more than the others, so a common suffix needs no
    # table. A common prefix does: "a a" against "a" deletes the first word, not the second.
    shared = _common_ending(ref, hyp)
    row, column = len(ref) - shared, len(hyp) - shared
    steps: list[Step] = [("cor", word, word) for word in reversed(ref[row:])]
    choices = _choices(ref[:row], hyp[:column])
    while row or column:
        choice = choices[row][column]
        if choice == _DIAGONAL:
            row, column = row - 1, column - 1
            steps.append(("cor" if ref[row] == hyp[column] else "sub", ref[row], hyp[column]))
        elif choice == _DELETION:
            row -= 1
            steps.append(("del", ref[row], None))
        else:
            column -= 1
            steps.append(("ins", None, hyp[column]))
    steps.reverse()
    return steps


def count_operations(ref: Sequence[str], hyp: Sequence[str]) -> tuple[int, int, int, int]:
    """Counts the operations of `align`, in most cases without computing the alignment.

    An alignment with S substitutions, P pairs of a deletion and an insertion, and d further deletions or insertions
    (the difference in length) costs 4 S + 6 P + 3 d. For nearly all utterances only one pair (S, P) has the minimum
    cost, which a C++ library computes fast; for the others, the alignment is computed.

    Args:
        ref: Reference words.
        hyp: Hypothesis words.

    Returns:
        Numbers of correct words, substitutions, insertions and deletions.

    Raises:
        TextTooLongError: As in `align`.
    """
    if ref == hyp:
        return len(ref), 0, 0, 0
    extra = len(hyp) - len(ref)
    if len(ref) * len(hyp) > MOST_CELLS:  # words that both end with need no table
        shared = _common_ending(ref, hyp)
        check_cells(len(ref) - shared, len(hyp) - shared, MOST_CELLS)
    cost = Levenshtein.distance(ref, hyp, weights=(INSERTION_COST, DELETION_COST, SUBSTITUTION_COST))
    pair = _ONLY_PAIR.get(cost - 3 * abs(extra))
    if pair is None:
        operations = [operation for operation, _, _ in align(ref, hyp)]
        return operations.count("cor"), operations.count("sub"), operations.count("ins"), operations.count("del")
    substitutions, both = pair
    deletions, insertions = both + max(-extra, 0), both + max(extra, 0)
    return len(ref) - substitutions - deletions, substitutions, insertions, deletions


def _only_pairs(largest: int = 24) -> dict[int, tuple[int, int]]:
    """Maps costs 4 S + 6 P to (S, P), for costs with a single such pair."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for substitutions in range(largest // 4 + 1):
        for both in range(largest // 6 + 1):
            cost = SUBSTITUTION_COST * substitutions + (INSERTION_COST + DELETION_COST) * both
            pairs.setdefault(cost, []).append((substitutions, both))
    return {cost: counts[0] for cost, counts in pairs.items() if cost <= largest and len(counts) == 1}


_ONLY_PAIR = _only_pairs()


def _common_ending(ref: Sequence[str], hyp: Sequence[str]) -> int:
    shared = 0
    for a, b in zip(reversed(ref), reversed(hyp), strict=False):
        if a != b:
            break
        shared += 1
    return shared


def _choices(ref: Sequence[str], hyp: Sequence[str]) -> list[bytearray]:
    """Computes the table of the best step into each cell, keeping one row of costs at a time."""
    check_cells(len(ref), len(hyp), MOST_CELLS)
    if len(hyp) > _FEW_WORDS:
        return _choices_in_arrays(ref, hyp)
    costs = list(range(0, INSERTION_COST * len(hyp) + 1, INSERTION_COST))
    table = [bytearray([_INSERTION]) * (len(hyp) + 1)]
    for row, ref_word in enumerate(ref, 1):
        left = row * DELETION_COST
        current, choices = [left], bytearray([_DELETION]) * (len(hyp) + 1)
        for column, hyp_word in enumerate(hyp, 1):
            diagonal = costs[column - 1] + (0 if ref_word == hyp_word else SUBSTITUTION_COST)
            deletion = costs[column] + DELETION_COST
            insertion = left + INSERTION_COST
            if diagonal <= deletion and diagonal <= insertion:
                left, choices[column] = diagonal, _DIAGONAL
            elif deletion < insertion:
                left = deletion
            else:
                left, choices[column] = insertion, _INSERTION
            current.append(left)
        costs = current
        table.append(choices)
    return table


def _choices_in_arrays(ref: Sequence[str], hyp: Sequence[str]) -> list[bytearray]:
    """`_choices`, a row at a time.

    An insertion continues the cheapest cell to the left: costs less the insertions up to each column are compared.
    """
    numbers: dict[str, int] = {}
    words = np.array([numbers.setdefault(word, len(numbers)) for word in hyp])
    inserted = INSERTION_COST * np.arange(len(hyp) + 1)
    costs: NDArray[np.int64] = inserted
    table = [bytearray([_INSERTION]) * (len(hyp) + 1)]
    for row, ref_word in enumerate(ref, 1):
        diagonal = costs[:-1] + np.where(words == numbers.get(ref_word, -1), 0, SUBSTITUTION_COST)
        deletion = costs[1:] + DELETION_COST
        entered = np.concatenate(([row * DELETION_COST], np.minimum(diagonal, deletion)))
        costs = np.minimum.accumulate(entered - inserted) + inserted
        insertion = costs[:-1] + INSERTION_COST
        straight = (diagonal <= deletion) & (diagonal <= insertion)
        choices = np.where(straight, _DIAGONAL, np.where(deletion < insertion, _DELETION, _INSERTION))
        table.append(bytearray([_DELETION]) + choices.astype(np.uint8).tobytes())
    return table
