"""What every method of search has: it reads the trials so far and says which one trains next, and how far.

A method keeps no state of its own that it could not compute from the trials: so a search that was killed continues as
it would have without.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field
from typing_extensions import override

from configurable.choices import Choice
from configurable.former_fields import former_fields
from storage.batching import derive_seed
from tasks.search.space import Space, SpaceError, Values

State = Literal["running", "paused", "finished", "failed"]
USUAL_TRIALS = 20
"""Number of trials where neither the method nor the configuration says one."""


@dataclass(frozen=True)
class SearchTrial:
    """A trial as methods see it.

    Attributes:
        number: Counts from 0.
        values: Values by field.
        state: `paused` after a budget, `finished` after the largest one, `failed` for good.
        budget: What it trains to, or has trained to, in epochs or what else budgets count; 0 if the search trains
            nothing.
        losses: What is minimized, by budget; finite.
    """

    number: int
    values: Values
    state: State
    budget: int
    losses: Mapping[int, float] = field(default_factory=dict)


class TrialJob(NamedTuple):
    """What to train next: a new trial, or a paused one that goes on."""

    number: int
    """The trial."""
    values: Values
    """Its values by field."""
    budget: int
    """What to train to, including what is already trained."""


@dataclass(frozen=True)
class SearchPlan:
    """What a method is to do.

    Attributes:
        space: The space.
        largest: Budget of a whole training; 0 if the search trains nothing.
        trials: Number of trials to begin; 0: as many as the method has by itself.
        seed: Seed of all draws.
    """

    space: Space
    largest: int
    trials: int = 0
    seed: int = 1

    def rng(self, number: int) -> np.random.Generator:
        """The random numbers of a trial; they do not depend on other trials."""
        return np.random.Generator(np.random.PCG64(derive_seed("search", self.seed, number)))


class MethodConfig(Choice, ABC):
    """Options of all methods of search.

    Attributes:
        pauses: Whether trials pause after a part of their training, and go on only if they are among the best.
    """

    pauses: ClassVar[bool] = False

    @property
    def restarts(self) -> bool:
        """Whether trials train from the start each time that they train longer."""
        return False

    @abstractmethod
    def build(self, plan: SearchPlan) -> "SearchMethod":
        """The method.

        Raises:
            SpaceError: It cannot search this space, or not within these limits.
        """

    def budgets(self, largest: int) -> tuple[int, ...]:
        """Budgets after which results are compared, ascending; the last is `largest`."""
        return (largest,)


def check_untrained(method: MethodConfig, section: str) -> None:
    """Check that a method can search values for which nothing is trained.

    Args:
        method: The method.
        section: The section of the configuration that names it.

    Raises:
        SpaceError: If not.
    """
    if method.pauses:
        raise SpaceError(
            f"{section}.method: {method.kind} compares trials after a part of their training, and a search over decode "
            "trains none: use grid, random or tpe"
        )


class RungsConfig(MethodConfig):
    """Options of the methods that compare trials after a part of their training."""

    pauses: ClassVar[bool] = True

    eta: int = Field(default=3, ge=2, le=100)
    """One in `eta` trials goes on, and trains `eta` times as long (published: 3 or 4)."""
    _former = former_fields("write `min_budget`", min_epochs=1)

    min_budget: int = Field(default=1, ge=1)
    """Smallest budget after which trials are compared, in what `search.budget` counts."""
    rungs: Literal["continue", "restart"] = "continue"
    """How a trial trains longer: `continue` from its checkpoint, which needs a learning rate that does not depend on
    the number of epochs, or `restart`, each time with a schedule of its own."""

    @property
    @override
    def restarts(self) -> bool:
        return self.rungs == "restart"

    def budgets(self, largest: int) -> tuple[int, ...]:
        """`largest` divided by powers of `eta`, down to `min_budget`, rounded to whole numbers."""
        count = 0
        while largest >= self.min_budget * self.eta ** (count + 1):
            count += 1
        return tuple(math.floor(largest / self.eta**power + 0.5) for power in range(count, -1, -1))


class SearchMethod(ABC):
    """A method at work on one search.

    Args:
        plan: What to do.

    Attributes:
        noun: What it trains, for messages.
    """

    noun: ClassVar[str] = "trial"

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan

    @property
    @abstractmethod
    def total(self) -> int:
        """Number of trials that the search has in all."""

    @property
    @abstractmethod
    def work(self) -> int:
        """What the trials of the whole search train, if none fails: the sum of their budgets."""

    @abstractmethod
    def next(self, trials: Sequence[SearchTrial]) -> TrialJob | None:
        """What to train next.

        Args:
            trials: All trials so far, by number.

        Returns:
            The job; None if there is nothing to do before a running trial ends, or, if none runs, at all.
        """

    def propose(self, number: int, trials: Sequence[SearchTrial]) -> Values:
        """The values of a new trial: by default a random point.

        Args:
            number: The new trial's number.
            trials: All trials so far, by number.
        """
        return self.plan.space.draw(self.plan.rng(number))


class WholeTrainings(SearchMethod):
    """A method whose trials all train to the end at once."""

    @property
    def total(self) -> int:
        """As many as configured."""
        return self.plan.trials or USUAL_TRIALS

    @property
    def work(self) -> int:
        """Every trial trains to the end."""
        return self.total * self.plan.largest

    def next(self, trials: Sequence[SearchTrial]) -> TrialJob | None:
        """A new trial, until there are enough."""
        number = len(trials)
        return TrialJob(number, self.propose(number, trials), self.plan.largest) if number < self.total else None


def all_trials(method: SearchMethod, loss: Callable[[Values], float]) -> list[SearchTrial]:
    """Run a whole search here and now, of trials that train nothing.

    Args:
        method: Proposes.
        loss: What values give, and the search minimizes.
    """
    trials: list[SearchTrial] = []
    while job := method.next(trials):
        trials.append(SearchTrial(job.number, job.values, "finished", job.budget, {job.budget: loss(job.values)}))
    return trials


class Standings:
    """The results of all trials by budget, in order, and which trials wait there to go on.

    It follows the trials of a search as they change, so that the next proposal does not sort ten thousand of them. It
    holds nothing that is not in them.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._known = 0
        self._open: set[int] = set()  # trials that may have changed since they were read
        self._read: dict[int, int] = {}  # how many results of a trial are read
        self._results: dict[int, list[tuple[float, int]]] = {}
        self._waiting: dict[int, list[tuple[float, int]]] = {}

    def follow(self, trials: Sequence[SearchTrial]) -> None:
        """Read what is new.

        Args:
            trials: All trials so far, by number.
        """
        if len(trials) < self._known:
            self._begin()  # another search
        self._open.update(range(self._known, len(trials)))
        self._known = len(trials)
        for number in sorted(self._open):
            self._follow(trials[number])

    def _follow(self, trial: SearchTrial) -> None:
        new = list(trial.losses.items())[self._read.get(trial.number, 0) :]
        for budget, loss in new:
            insort(self._results.setdefault(budget, []), (loss, trial.number))
        self._read[trial.number] = len(trial.losses)
        if trial.state == "running":
            return
        self._open.discard(trial.number)
        if trial.state == "failed":  # it has been in the rung, too, below all others
            insort(self._results.setdefault(trial.budget, []), (math.inf, trial.number))
        elif trial.state == "paused":
            insort(self._waiting.setdefault(trial.budget, []), (trial.losses[trial.budget], trial.number))

    def results(self, budget: int) -> Sequence[tuple[float, int]]:
        """Loss and trial of all results after a budget, best first; of a trial that failed there, infinity."""
        return self._results.get(budget, ())

    def take(self, budget: int, count: int) -> int | None:
        """The best trial that waits after a budget, if it is among so many best of all; it no longer waits."""
        waiting, results = self._waiting.get(budget, []), self.results(budget)
        if not waiting or bisect_left(results, waiting[0]) >= count:
            return None
        _, number = waiting.pop(0)
        self.watch(number)
        return number

    def watch(self, number: int) -> None:
        """Read a trial again: it goes on."""
        self._open.add(number)


def rung_work(trials: Sequence[int], budgets: Sequence[int], restarts: bool) -> int:
    """What rungs train.

    Args:
        trials: Of each rung, how many trials it has.
        budgets: Of each rung, what its trials have trained when they are compared, ascending.
        restarts: Whether every rung trains from the start.
    """
    before = [0] * len(budgets) if restarts else [0, *budgets[:-1]]
    return sum(count * (last - first) for count, first, last in zip(trials, before, budgets, strict=True))


def best(trials: Sequence[SearchTrial], budget: int, count: int) -> list[SearchTrial]:
    """The trials with the lowest losses after a budget, best first; among equals, the earlier ones."""
    there = [trial for trial in trials if budget in trial.losses]
    return sorted(there, key=lambda trial: (trial.losses[budget], trial.number))[:count]
