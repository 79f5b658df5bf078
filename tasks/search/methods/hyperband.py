"""Hyperband (Li et al. 2018): brackets of successive halving, from many short trainings to few whole ones.

A bracket begins n trials at a budget r; the best of them, one in eta, go on to eta times as much, and so on, until the
last ones are whole trainings. The published algorithm needs only that a training's loss after a budget tells something
of its loss after a larger one, and counts a trial that goes on as trained from where it paused.

Algorithm 1 rounds (s_max + 1) / (s + 1) * eta^s up, which for R = 81 and eta = 3 gives brackets of 81, 34, 15, 8 and 5
trials. The published table and the authors' code have 81, 27, 9, 6 and 5: they round the quotient down first. So does
this.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from tasks.search.methods.base import RungsConfig, SearchMethod, SearchPlan, SearchTrial, TrialJob, best, rung_work


class Rung(NamedTuple):
    """A part of a bracket: how many trials train to which budget."""

    trials: int
    budget: int


def brackets(budgets: Sequence[int], eta: int) -> list[tuple[Rung, ...]]:
    """The brackets of one pass, the one with the shortest trainings first.

    Args:
        budgets: Ascending, each about `eta` times the one before.
        eta: One in `eta` trials of a rung goes on.
    """
    last = len(budgets) - 1
    found = []
    for s in range(last, -1, -1):
        count = (last + 1) // (s + 1) * eta**s
        found.append(tuple(Rung(count // eta**i, budgets[last - s + i]) for i in range(s + 1)))
    return found


class HyperbandConfig(RungsConfig):
    """Hyperband (Li et al. 2018, JMLR 18): brackets of successive halving; the budget of a whole training is its R."""

    kind: Literal["hyperband"] = "hyperband"

    def build(self, plan: SearchPlan) -> "HyperbandSearch":
        """The method; it can search any space."""
        return HyperbandSearch(plan, self)


class HyperbandSearch(SearchMethod):
    """Runs whole brackets, one pass or as many as the number of trials asks for.

    Where several trials train at once, a bracket begins when the one before has nothing left to start.

    Args:
        plan: What to do.
        cfg: The budgets.
    """

    def __init__(self, plan: SearchPlan, cfg: RungsConfig) -> None:
        super().__init__(plan)
        self.brackets = brackets(cfg.budgets(plan.largest), cfg.eta)
        self._restarts = cfg.restarts
        self._over = (0, 0)  # the first bracket that may have something to do, and its first trial

    @property
    def total(self) -> int:
        """The trials of whole brackets, as many as hold the configured number."""
        return max(first + rungs[0].trials for first, rungs in self._begun())

    @property
    def work(self) -> int:
        """Those of all rungs."""
        begun = [list(zip(*rungs, strict=True)) for _, rungs in self._begun()]
        return sum(rung_work(trials, budgets, self._restarts) for trials, budgets in begun)

    def _begun(self, number: int = 0, first: int = 0) -> Iterator[tuple[int, tuple[Rung, ...]]]:
        """The first trial of each bracket, and its rungs; from a bracket on, whose number and first trial are given."""
        while first < self.plan.trials if self.plan.trials else number < len(self.brackets):
            rungs = self.brackets[number % len(self.brackets)]
            yield first, rungs
            first, number = first + rungs[0].trials, number + 1

    def next(self, trials: Sequence[SearchTrial]) -> TrialJob | None:
        """The first trial of the first bracket that has one to begin or to continue."""
        if len(trials) < self._over[1]:
            self._over = (0, 0)  # another search
        for number, (first, rungs) in enumerate(self._begun(*self._over), self._over[0]):
            end = first + rungs[0].trials
            if job := self._next_of(trials, first, rungs):
                return job
            if first == self._over[1] and not any(trial.state == "running" for trial in trials[first:end]):
                self._over = (number + 1, end)
        return None

    def _next_of(self, trials: Sequence[SearchTrial], first: int, rungs: Sequence[Rung]) -> TrialJob | None:
        if len(trials) < first + rungs[0].trials:
            number = len(trials)
            return TrialJob(number, self.propose(number, trials), rungs[0].budget)
        members: Sequence[SearchTrial] = trials[first : first + rungs[0].trials]
        for (_, before), rung in itertools.pairwise(rungs):
            if any(trial.state == "running" and trial.budget <= before for trial in members):
                return None  # the best are not known yet
            members = best(members, before, rung.trials)
            for trial in members:
                if trial.state == "paused" and trial.budget == before:
                    return TrialJob(trial.number, trial.values, rung.budget)
        return None
