"""The best configuration, trained again with other seeds: its mean, and how much trainings differ by chance.

The best of many trials is partly the luckiest. So its own result counts neither for the mean nor for the spread: all
seeds are other ones than the search's. Only the training's seed changes (`train.seed`); the sets stay as they are.

These trainings are a study of their own, beside that of the search: they are kept, killed and continued as trials are.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from tasks.search.methods.base import SearchMethod, SearchTrial, TrialJob
from tasks.search.study import Study

SEED = "train.seed"
"""The field that differs."""


class SeedTrainings(SearchMethod):
    """Trains one configuration to the end with each of some seeds.

    Args:
        first: The first seed; the others follow it.
        count: How many.
        largest: Budget of a whole training.
    """

    noun: ClassVar[str] = "training"

    def __init__(self, first: int, count: int, largest: int) -> None:
        self._first, self._count, self._largest = first, count, largest

    @property
    @override
    def total(self) -> int:
        return self._count

    @property
    @override
    def work(self) -> int:
        return self._count * self._largest

    @override
    def next(self, trials: Sequence[SearchTrial]) -> TrialJob | None:
        number = len(trials)
        return TrialJob(number, {SEED: self._first + number}, self._largest) if number < self._count else None


@dataclass(frozen=True)
class SeedSpread:
    """What the trainings of a trial's configuration with other seeds have given.

    Attributes:
        trial: The trial.
        planned: Number of seeds.
        budget: Of each training.
        losses: What is minimized, by seed, of those that have ended.
        errors: Why others have failed, by seed.
        evaluation: Of the best of them: scores of the test sets, registered version, and why it was promoted or not;
            empty before.
    """

    trial: int
    planned: int
    budget: int
    losses: Mapping[int, float]
    errors: Mapping[int, str]
    evaluation: Mapping[str, Any]

    @property
    def mean(self) -> float | None:
        """Mean of what is minimized; None without results."""
        return statistics.mean(self.losses.values()) if self.losses else None

    @property
    def std(self) -> float | None:
        """Standard deviation of what is minimized (of a sample: n - 1); None with fewer than two results."""
        return statistics.stdev(self.losses.values()) if len(self.losses) > 1 else None

    @property
    def spread(self) -> float | None:
        """How much two trainings of this configuration differ (root mean square): sqrt(2) times `std`."""
        return None if self.std is None else math.sqrt(2) * self.std

    @property
    def best_seed(self) -> int | None:
        """The seed with the lowest result."""
        return min(self.losses, key=lambda seed: (self.losses[seed], seed), default=None)

    def equal(self, trials: Sequence[SearchTrial]) -> list[int]:
        """Numbers of the trials that differ from the best one by less than the spread.

        Only whole trainings are compared: of shorter ones, the spread is not known.

        Args:
            trials: All trials by number.
        """
        best = trials[self.trial].losses.get(self.budget)
        if best is None or self.spread is None:
            return []
        losses = {t.number: t.losses[self.budget] for t in trials if self.budget in t.losses}
        return [n for n, loss in losses.items() if n != self.trial and abs(loss - best) < self.spread]

    def to_dict(self, trials: Sequence[SearchTrial]) -> dict[str, Any]:
        """A JSON value, with the trials that are equal to the best."""
        return {
            **{name: getattr(self, name) for name in ("trial", "planned", "budget", "mean", "std", "spread")},
            "losses": dict(self.losses),
            "errors": dict(self.errors),
            "best_seed": self.best_seed,
            "equal": self.equal(trials),
            "evaluation": dict(self.evaluation) or None,
        }


def seed_spread(study: Study) -> SeedSpread | None:
    """What is known of the seeds of a study's best trial; None if none was trained with others.

    Args:
        study: Of a search.
    """
    best = study.best
    seeds = best and study.seeds_of(best.number)
    if not best or not seeds:
        return None
    ended = {trial.values[SEED]: trial for trial in seeds.trials if trial.losses}
    figures = [trial.figures[trial.trained] for trial in ended.values()]
    return SeedSpread(
        trial=best.number,
        planned=seeds.about["trials"],
        budget=seeds.about["largest"],
        losses={seed: trial.losses[trial.trained] for seed, trial in ended.items()},
        errors={trial.values[SEED]: trial.error for trial in seeds.trials if trial.state == "failed"},
        evaluation=next((known["evaluation"] for known in figures if "evaluation" in known), {}),
    )
