"""What a study tells: the course of its results, the rungs, and which fields matter."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.batching import derive_seed
from tasks.search.methods.tpe import optuna_library, optuna_trial
from tasks.search.space import ParameterConfig, Space
from tasks.search.study import Study, StudyTrial

ENOUGH = 20
"""Results from which the importance of fields is estimated."""
_MOST = 1000
"""Number of results that it is estimated from; of more, some that are spread evenly over the search."""
_GOOD, _FEWEST = 0.1, 5
"""Share of the results that count as good, and how many at least: Optuna's advice."""
_SHUFFLES = 20


class SearchStep(NamedTuple):
    """A result in the course of a search."""

    work: int
    """What all trials have trained by then; of a search that trains nothing, trials with a result."""
    trial: StudyTrial
    """Of which trial it is."""
    budget: int
    """The trial's budget at this result."""
    loss: float
    """What is minimized."""


def course(trials: Sequence[StudyTrial], restarts: bool = False) -> list[SearchStep]:
    """The results in the order in which they came.

    Args:
        trials: The trials.
        restarts: Whether every rung trained from the start.
    """
    results = sorted(
        ((trial.at.get(budget, 0.0), trial.number, budget) for trial in trials for budget in trial.losses),
        key=lambda result: (result[0], result[2], result[1]),  # of one moment, the shorter training was first
    )
    known = {trial.number: trial for trial in trials}
    spent, reached, steps = 0, dict.fromkeys(known, 0), []
    for _, number, budget in results:
        spent += (budget if restarts else budget - reached[number]) or 1  # without training: one trial
        reached[number] = budget
        steps.append(SearchStep(spent, known[number], budget, known[number].losses[budget]))
    return steps


def ranked(trials: Sequence[StudyTrial]) -> list[StudyTrial]:
    """The best first: the longest trained, and of these the one with the lowest loss; those without a result last."""

    def place(trial: StudyTrial) -> tuple[int, float, int]:
        last = max(trial.losses, default=0)
        return -last, trial.losses.get(last, math.inf), trial.number

    return sorted(trials, key=place)


class StudyRung(NamedTuple):
    """The trials that began at one budget and were compared at another."""

    first: int
    """Budget after which these trials were compared first, which tells the bracket."""
    budget: int
    """Budget after which they are compared here."""
    went_on: list[StudyTrial]
    """Those that train longer, or have."""
    stayed: list[StudyTrial]
    """The others with a result."""
    failed: list[StudyTrial]
    """Those that failed before they had one."""


def study_rungs(trials: Sequence[StudyTrial]) -> list[StudyRung]:
    """The rungs of all brackets, by the budgets that they begin with."""
    rungs: dict[tuple[int, int], StudyRung] = {}
    for trial in trials:
        budgets = sorted(trial.losses)
        failed_at = [trial.budget] if trial.state == "failed" else []
        for budget in (*budgets, *failed_at):
            first = budgets[0] if budgets else budget
            rung = rungs.setdefault((first, budget), StudyRung(first, budget, [], [], []))
            if budget not in trial.losses:
                rung.failed.append(trial)
            else:
                (rung.went_on if trial.budget > budget else rung.stayed).append(trial)
    return [rungs[key] for key in sorted(rungs)]


class Importance(NamedTuple):
    """How much a field matters to be among the good trials."""

    field: str
    """The field."""
    share: float
    """Of all fields' importance."""
    chance: float
    """What this field would reach if the losses were dealt to the trials at random: the highest of some such deals."""


class Importances(NamedTuple):
    """How much each field matters."""

    budget: int
    """Epochs after which the results are compared."""
    results: int
    """Number of results."""
    fields: list[Importance]
    """The most important ones first."""


def study_space(study: Study) -> Space:
    """The space that a study searches."""
    return Space({name: ParameterConfig.model_validate(field) for name, field in study.content["space"].items()})


def importances(space: Space, trials: Sequence[StudyTrial]) -> Importances | None:
    """How much each field matters, by Optuna's PED-ANOVA (Watanabe et al. 2023).

    It compares where the good trials are with where all are, so it needs no model of the loss, and a field that is
    searched only under conditions counts where they hold. Interactions of fields are not seen. The results are those
    after the largest budget that has enough.

    Args:
        space: The space.
        trials: The trials.

    Returns:
        None if no budget has enough results.
    """
    budgets = sorted({budget for trial in trials for budget in trial.losses}, reverse=True)
    for budget in budgets:
        there = [trial for trial in trials if budget in trial.losses]
        if len(there) >= ENOUGH:
            return Importances(budget, len(there), _by_field(space, there, budget))
    return None


def _by_field(space: Space, trials: Sequence[StudyTrial], budget: int) -> list[Importance]:
    some = trials[:: math.ceil(len(trials) / _MOST)]
    losses = np.array([trial.losses[budget] for trial in some])
    optuna = optuna_library("the importance of fields")
    study = optuna.create_study()
    for trial, loss in zip(some, losses, strict=True):
        study.add_trial(optuna_trial(optuna, space, trial.values, float(loss)))
    judge = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=max(_GOOD, _FEWEST / len(some)))

    def judged(losses: NDArray[np.float64]) -> Mapping[str, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that low values of a given target count as good: they do
            return dict(judge.evaluate(study, target=lambda trial: float(losses[trial.number])))

    rng = np.random.Generator(np.random.PCG64(derive_seed("importance", len(some))))
    found = judged(losses)
    dealt = [judged(rng.permutation(losses)) for _ in range(_SHUFFLES)]
    whole = sum(found.values()) or 1.0
    fields = [
        Importance(name, share / whole, max(deal.get(name, 0.0) for deal in dealt) / whole)
        for name, share in found.items()
    ]
    return sorted(fields, key=lambda field: -field.share)
