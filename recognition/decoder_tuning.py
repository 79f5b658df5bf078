"""Chooses a decoder's parameters: speech is encoded once, and searched with every combination of values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from recognition.decoding_pool import DecodingPool, useful_processes
from recognition.recognizer import Recognizer
from speech.scoring import ErrorCounts, score_utterance

E = TypeVar("E")
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
    recognizer: Recognizer[E],
    encoded: Sequence[tuple[Sequence[str], E]],
    grid: Grid,
    processes: int = 1,
    on_progress: Callable[[int, int], object] | None = None,
) -> list[Trial]:
    """Search with all combinations of values, in the order of the grid.

    Args:
        recognizer: The model; its decoder's configuration gives all other fields.
        encoded: Transcripts of batches, and what the recognizer has encoded.
        grid: The values.
        processes: Processes for a slow search, as far as the work is worth them.
        on_progress: Called with the number of finished combinations and of all.

    Raises:
        DecodeError: The recognizer's decoders cannot be tuned.
    """
    recognizer.spec.system.require("tuning")
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    total = len(combinations) * sum(len(texts) for texts, _ in encoded)
    count = useful_processes(recognizer, processes, total)
    if count < 2:
        recognizer.prepare()  # each combination shares what is read here
    trials = []
    with DecodingPool[Sequence[str]](recognizer, count) as pool:
        for values in combinations:
            pool.use(recognizer.with_decoder(recognizer.cfg.model_copy(update=values)))
            errors = ErrorCounts()
            for texts, hypotheses in pool.each(encoded):
                for text, hypothesis in zip(texts, hypotheses, strict=True):
                    errors += score_utterance(text, recognizer.spec.comparable(hypothesis))
            trials.append(Trial(values, errors))
            if on_progress:
                on_progress(len(trials), len(combinations))
    return trials


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
