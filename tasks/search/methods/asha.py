"""Asynchronous successive halving (Li et al. 2020): a trial goes on as soon as it is among the best of its rung.

Nobody waits for a rung to be full, so any number of trials train at once without idle time. A trial may go on that
would not have been among the best in the end. The published algorithm counts the rungs' budgets from the smallest one
upwards; here they are the largest one divided by powers of eta, which is the same if the quotient of the two is such a
power.
"""

from collections.abc import Sequence
from typing import Literal

from tasks.search.methods.base import (
    USUAL_TRIALS,
    RungsConfig,
    SearchMethod,
    SearchPlan,
    SearchTrial,
    Standings,
    TrialJob,
    rung_work,
)


class AshaConfig(RungsConfig):
    """Asynchronous successive halving (ASHA: Li et al. 2020, MLSys)."""

    kind: Literal["asha"] = "asha"

    def build(self, plan: SearchPlan) -> "AshaSearch":
        """The method; it can search any space."""
        return AshaSearch(plan, self)


class AshaSearch(SearchMethod):
    """Continues a trial if one can be continued, the longest trained first, or else begins one (Algorithm 2).

    Args:
        plan: What to do.
        cfg: The budgets.
    """

    def __init__(self, plan: SearchPlan, cfg: RungsConfig) -> None:
        super().__init__(plan)
        self._cfg, self._eta, self._budgets = cfg, cfg.eta, cfg.budgets(plan.largest)
        self._standings = Standings()

    @property
    def total(self) -> int:
        """As many as configured."""
        return self.plan.trials or USUAL_TRIALS

    @property
    def work(self) -> int:
        """One in `eta` trials of each rung goes on; in fact, a few more that are not among the best in the end."""
        trials = [self.total // self._eta**rung for rung in range(len(self._budgets))]
        return rung_work(trials, self._budgets, self._cfg.restarts)

    def next(self, trials: Sequence[SearchTrial]) -> TrialJob | None:
        """The job of the highest rung with a trial to continue; if there is none, a new trial."""
        self._standings.follow(trials)
        for budget, longer in reversed(list(zip(self._budgets, self._budgets[1:], strict=False))):
            count = len(self._standings.results(budget)) // self._eta
            if (best := self._standings.take(budget, count)) is not None:
                return TrialJob(best, trials[best].values, longer)
        number = len(trials)
        return TrialJob(number, self.propose(number, trials), self._budgets[0]) if number < self.total else None
