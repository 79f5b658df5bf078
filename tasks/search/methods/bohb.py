"""BOHB (Falkner et al. 2018): Hyperband's brackets, whose trials a model of the results proposes.

The model is that of the paper: two kernel density estimates over the results after the largest budget that has enough,
one of the good trials and one of the others, with the bandwidths of Scott's rule. Of 64 points drawn around good
trials, the one with the highest ratio of the densities is proposed; one in three trials is random. As in the authors'
code, a field whose condition does not hold gets the value of another trial, and a failed trial counts as the worst of
its budget.

It differs from the published one in two ways. There, a bracket's trials are proposed while earlier ones train, by
workers that ask when they are free; here they are proposed in order, after the results that there are, so that one
trial at a time gives the same search again. And where a categorical field has c choices, the bandwidth of its kernel
is at most (c - 1) / c, where the kernel is uniform.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tasks.search.methods.base import RungsConfig, SearchPlan, SearchTrial, Standings, TrialJob
from tasks.search.methods.hyperband import HyperbandSearch
from tasks.search.space import Values

_GOOD_SHARE = 0.15
_CANDIDATES = 64
_WIDER = 3.0
"""Factor of the bandwidths when candidates are drawn, so that they also leave the neighbourhood of good trials."""
_REDRAWN = 10
"""How often a Gaussian's draws outside of 0 and 1 are drawn again."""
_NARROWEST = 1e-3
_TINY = 1e-32
Positions = NDArray[np.float64]


class BohbConfig(RungsConfig):
    """BOHB (Falkner et al. 2018, ICML): Hyperband with trials proposed by a model of the results."""

    kind: Literal["bohb"] = "bohb"
    random_share: float = Field(default=1 / 3, ge=0, le=1)
    """Share of the trials that are drawn at random (published: 1/3)."""

    def build(self, plan: SearchPlan) -> "BohbSearch":
        """The method; it can search any space."""
        return BohbSearch(plan, self)


class BohbSearch(HyperbandSearch):
    """Hyperband whose `propose` asks the model.

    Args:
        plan: What to do.
        cfg: The budgets, and the share of random trials.
    """

    def __init__(self, plan: SearchPlan, cfg: BohbConfig) -> None:
        super().__init__(plan, cfg)
        self._budgets, self._random_share = cfg.budgets(plan.largest), cfg.random_share
        self._standings = Standings()
        self._points: dict[int, Positions] = {}

    def next(self, trials: Sequence[SearchTrial]) -> TrialJob | None:
        """As Hyperband's."""
        if (job := super().next(trials)) and job.number < len(trials):
            self._standings.watch(job.number)
        return job

    def propose(self, number: int, trials: Sequence[SearchTrial]) -> Values:
        """The model's proposal, or a random point: for a share of the trials, and before there are enough results."""
        rng, space = self.plan.rng(number), self.plan.space
        if rng.random() < self._random_share or (ranked := self._ranked(trials)) is None:
            return space.draw(rng)
        points = _filled(np.stack([self._point(trial) for trial in ranked]), rng)
        least = len(space) + 1
        split = max(least, int(_GOOD_SHARE * len(ranked)))
        sizes = np.array([len(parameter.choices) for parameter in space.parameters.values()])
        good = Density(points[:split], sizes)
        other = Density(points[-max(least, len(ranked) - split) :], sizes)
        candidates = good.draw(_CANDIDATES, rng)
        ratio = np.maximum(good(candidates), _TINY) / np.maximum(other(candidates), _TINY)
        return space.at(candidates[int(ratio.argmax())])

    def _ranked(self, trials: Sequence[SearchTrial]) -> list[SearchTrial] | None:
        """The trials of the largest budget with enough results, best first; None if no budget has enough."""
        self._standings.follow(trials)
        for budget in reversed(self._budgets):
            results = self._standings.results(budget)
            if len(results) >= len(self.plan.space) + 1 + 2:
                return [trials[number] for _, number in results]
        return None

    def _point(self, trial: SearchTrial) -> Positions:
        if trial.number not in self._points:
            self._points[trial.number] = self.plan.space.positions(trial.values)
        return self._points[trial.number]


class Density:
    """A kernel density estimate over points of the unit cube: Gaussian, and Aitchison-Aitken for choices.

    Args:
        points: [points, fields]; of a choice, the middle of its part.
        sizes: Number of choices of each field; 0 for ranges [fields].
    """

    def __init__(self, points: Positions, sizes: NDArray[np.int64]) -> None:
        self._points, self._sizes = points, sizes
        # of choices, the numbers count as distances, as in statsmodels
        scale = np.where(sizes > 0, np.maximum(sizes, 1), 1.0)
        rule = 1.06 * (points * scale).std(axis=0) * len(points) ** (-1.0 / (4 + points.shape[1]))
        most = np.where(sizes > 0, (sizes - 1) / np.maximum(sizes, 1), np.inf)
        self._widths = np.minimum(np.maximum(rule, _NARROWEST), np.maximum(most, _NARROWEST))

    def __call__(self, points: Positions) -> Positions:
        """The density at points [points, fields]."""
        apart = np.abs(points[:, None, :] - self._points[None, :, :])
        gauss = np.exp(-0.5 * (apart / self._widths) ** 2) / (self._widths * np.sqrt(2 * np.pi))
        same = apart < 0.5 / np.maximum(self._sizes, 1)
        kernel = np.where(same, 1 - self._widths, self._widths / np.maximum(self._sizes - 1, 1))
        density: Positions = np.where(self._sizes > 0, kernel, gauss).prod(axis=2).mean(axis=1)
        return density

    def draw(self, count: int, rng: np.random.Generator) -> Positions:
        """Points near the estimate's own, from wider kernels, within the cube [count, fields]."""
        points = self._points[rng.integers(len(self._points), size=count)]
        choice = self._sizes > 0
        redrawn = choice & (rng.random(points.shape) < self._widths)
        other = (rng.integers(np.maximum(self._sizes, 1), size=points.shape) + 0.5) / np.maximum(self._sizes, 1)
        drawn = rng.normal(points, _WIDER * self._widths)
        for _ in range(_REDRAWN):
            outside = (drawn < 0) | (drawn > 1)
            drawn[outside] = rng.normal(points, _WIDER * self._widths)[outside]
        drawn = np.where((drawn < 0) | (drawn > 1), points, drawn)
        candidates: Positions = np.where(choice, np.where(redrawn, other, points), drawn)
        return candidates


def _filled(points: Positions, rng: np.random.Generator) -> Positions:
    """With values for fields whose conditions do not hold: those of a random trial where they do, or else any."""
    filled = points.copy()
    for field in range(points.shape[1]):
        lacks = np.isnan(points[:, field])
        known = points[~lacks, field]
        filled[lacks, field] = rng.choice(known, lacks.sum()) if len(known) else rng.random(lacks.sum())
    return filled
