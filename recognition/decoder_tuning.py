"""Chooses a decoder's parameters: the model's output is computed once, and decoded with every combination of values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from recognition.decoding_pool import DecodingPool, useful_processes
from recognition.recognizer import Scores
from speech.decoding import Decoder
from speech.scoring import ErrorCounts, score_utterance

Grid = Mapping[str, Sequence[Any]]
"""The values to try by field of the decoder's configuration, ascending."""


@dataclass(frozen=True)
class Trial:
    """One combination of values, and the errors that it makes."""

    values: dict[str, Any]
    """Values by field."""
    counts: ErrorCounts
    """Errors over all utterances."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value."""
        return self.values | {"errors": self.counts.errors, "wer": self.counts.wer, "cer": self.counts.cer}


def try_all(
    decoder: Decoder,
    scored: Sequence[tuple[Sequence[str], Scores]],
    grid: Grid,
    processes: int = 1,
    on_progress: Callable[[int, int], object] | None = None,
) -> list[Trial]:
    """Decode with all combinations of values, in the order of the grid.

    Args:
        decoder: The decoder; its configuration gives all other fields.
        scored: Transcripts of batches, and the model's output.
        grid: The values.
        processes: Processes for a slow search, as far as the work is worth them.
        on_progress: Called with the number of finished combinations and of all.
    """
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    total = len(combinations) * sum(len(texts) for texts, _ in scored)
    count = useful_processes(decoder, processes, total)
    if count < 2:
        decoder.prepare()  # each combination shares what is read here
    pool: DecodingPool[Sequence[str]] = DecodingPool(decoder, count)
    found = []
    with pool:
        for values in combinations:
            pool.use(decoder.with_config(decoder.cfg.model_copy(update=values)))
            found.append(Trial(values, _errors(pool, scored)))
            if on_progress:
                on_progress(len(found), len(combinations))
    return found


def _errors(pool: DecodingPool[Sequence[str]], scored: Sequence[tuple[Sequence[str], Scores]]) -> ErrorCounts:
    total = ErrorCounts()

    def take(texts: Sequence[str], hypotheses: Sequence[Any]) -> None:
        nonlocal total
        for text, hypothesis in zip(texts, hypotheses, strict=True):
            total += score_utterance(text, hypothesis.text)

    for texts, scores in scored:
        for done in pool.add(texts, scores):
            take(*done)
    for done in pool.rest():
        take(*done)
    return total


def best_trial(trials: Sequence[Trial], grid: Grid, configured: Mapping[str, Any]) -> Trial:
    """The trial with the fewest word errors.

    Among equal ones, the one with the fewest character errors; then the one whose values are fewest steps of the
    grid away from the configured ones; then the first.

    Args:
        trials: All trials.
        grid: Their values.
        configured: The configured values by field; the grid contains them.
    """

    def steps(trial: Trial) -> int:
        return sum(
            abs(list(values).index(trial.values[name]) - list(values).index(configured[name]))
            for name, values in grid.items()
        )

    return min(trials, key=lambda trial: (trial.counts.errors, trial.counts.char_errors, steps(trial)))
