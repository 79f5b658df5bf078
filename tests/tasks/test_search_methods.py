"""What all methods of search promise, on a surface whose lowest point is known; and the published schedules."""

import itertools
import math
from dataclasses import replace

import pytest

from tasks.search.methods import METHODS
from tasks.search.methods.base import SearchPlan, SearchTrial
from tasks.search.methods.hyperband import brackets
from tasks.search.space import ParameterConfig, Space, SpaceError

SPACE = {
    "lr": {"low": 1e-4, "high": 1e-1, "log": True, "points": 4},
    "layers": {"low": 2, "high": 5, "integer": True},
    "optimizer": ["adamw", {"kind": "sgd"}],
    "momentum": {"low": 0.5, "high": 0.99, "points": 3, "when": {"optimizer": "sgd"}},
    "extra": [None, {"rank": 4}],
}
LARGEST = 81


def space(fields=SPACE):
    return Space({name: ParameterConfig.model_validate(value) for name, value in fields.items()})


def loss(values, budget):
    """Lowest at lr 0.01, 4 layers and momentum 0.9; a longer training never changes the order."""
    apart = (math.log10(values["lr"]) + 2) ** 2 + 0.1 * abs(values["layers"] - 4)
    return apart + (values.get("momentum", 0.9) - 0.9) ** 2 + 1 / budget


def method(kind, trials=0, seed=1, fields=SPACE, largest=LARGEST, **options):
    if kind == "tpe":
        pytest.importorskip("optuna", reason="search.method tpe needs optuna: pip install '.[pipeline]'")
    return METHODS[kind](**options).build(SearchPlan(space(fields), largest, trials, seed))


class Lab:
    """Runs the jobs of a method; of those that run at the same time, a given one ends first.

    Args:
        searcher: The method.
        parallel: Jobs at the same time.
        fails: Says whether a job fails.
    """

    def __init__(self, searcher, parallel=1, fails=lambda job: False):
        self.searcher, self.parallel, self.fails = searcher, parallel, fails
        self.trials, self.jobs, self.running = [], [], []

    def begin(self):
        """Start jobs until there is none, or enough run."""
        while len(self.running) < self.parallel and (job := self.searcher.next(self.trials)):
            if job.number == len(self.trials):
                self.trials.append(SearchTrial(job.number, job.values, "running", job.budget))
            else:
                trial = self.trials[job.number]
                assert trial.state == "paused"
                assert trial.budget < job.budget
                assert trial.values == job.values
                self.trials[job.number] = replace(trial, state="running", budget=job.budget)
            self.jobs.append(job)
            self.running.append(job)
        return bool(self.running)

    def end(self, position=0):
        """End one of the running jobs."""
        job = self.running.pop(position % len(self.running))
        trial = self.trials[job.number]
        if self.fails(job):
            self.trials[job.number] = replace(trial, state="failed")
            return
        losses = {**trial.losses, job.budget: loss(job.values, job.budget)}
        state = "finished" if job.budget == self.searcher.plan.largest else "paused"
        self.trials[job.number] = replace(trial, state=state, losses=losses)

    def run(self, order=lambda step: 0):
        step = 0
        while self.begin():
            self.end(order(step))
            step += 1
        return self


@pytest.fixture(params=METHODS)
def kind(request):
    return request.param


@pytest.mark.parametrize("parallel", [1, 7])
def test_a_method_begins_all_its_trials_once_and_only_points_of_the_space(kind, parallel):
    lab = Lab(method(kind), parallel).run(lambda step: 5 * step)
    assert [trial.number for trial in lab.trials] == list(range(lab.searcher.total))
    assert all(lab.searcher.plan.space.holds(job.values) for job in lab.jobs)
    assert len({(job.number, job.budget) for job in lab.jobs}) == len(lab.jobs)
    assert {job.budget for job in lab.jobs} <= {1, 3, 9, 27, 81}
    assert any(trial.state == "finished" for trial in lab.trials) or kind == "asha"


def test_the_same_seed_proposes_the_same_and_another_seed_something_else(kind):
    first, again, other = (Lab(method(kind, seed=seed)).run().jobs for seed in (5, 5, 6))
    assert first == again
    assert kind == "grid" or first != other


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_method_that_is_built_anew_at_any_moment_goes_on_as_if_it_had_not_been(kind, parallel):
    """So what a method remembers of the trials is what it would read of them."""

    def fails(job):
        return (job.number + job.budget) % 11 == 0

    lab = Lab(method(kind), parallel, fails)
    steps = 0
    while lab.begin():
        lab.end(5 * steps)
        steps += 1
        if steps % 7 == 0:
            lab.searcher = method(kind)
    assert lab.jobs == Lab(method(kind), parallel, fails).run(lambda step: 5 * step).jobs


def test_a_proposal_that_is_not_taken_up_changes_nothing(kind):
    searcher = method(kind)
    assert searcher.next([]) == searcher.next([])
    lab = Lab(method(kind))
    while lab.begin():
        lab.end()
        assert lab.searcher.next(lab.trials) == lab.searcher.next(lab.trials)
    assert lab.jobs == Lab(method(kind)).run().jobs


def test_a_method_that_is_asked_about_another_search_answers_as_a_new_one(kind):
    searcher = method(kind)
    first = Lab(searcher).run().jobs
    assert Lab(searcher).run().jobs == first


def test_failed_trials_neither_stop_a_search_nor_go_on(kind):
    lab = Lab(method(kind), fails=lambda job: job.number % 3 == 0).run()
    assert len(lab.trials) == lab.searcher.total
    assert all(trial.state == "failed" for trial in lab.trials if trial.number % 3 == 0)
    assert len([job for job in lab.jobs if job.number % 3 == 0]) == math.ceil(len(lab.trials) / 3)


def test_a_search_of_which_every_trial_fails_ends(kind):
    lab = Lab(method(kind), parallel=3, fails=lambda job: True).run()
    assert len(lab.jobs) == len(lab.trials) == lab.searcher.total


def test_the_number_of_trials_is_that_of_the_configuration():
    for kind, total in (("random", 33), ("tpe", 33), ("asha", 33), ("hyperband", 81), ("bohb", 81)):
        assert len(Lab(method(kind, trials=33)).run().trials) == total, kind


# --- the published schedules


def test_brackets_are_those_of_the_published_table():
    """Li et al. 2018, Table 1: R = 81, eta = 3."""
    table = [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(27, 3), (9, 9), (3, 27), (1, 81)],
        [(9, 9), (3, 27), (1, 81)],
        [(6, 27), (2, 81)],
        [(5, 81)],
    ]
    assert [[tuple(rung) for rung in rungs] for rungs in brackets((1, 3, 9, 27, 81), 3)] == table


@pytest.mark.parametrize("kind", ["hyperband", "bohb"])
def test_trials_train_as_the_table_says(kind):
    lab = Lab(method(kind)).run()
    begun = [(81, 1), (27, 3), (9, 9), (6, 27), (5, 81)]
    reached = {budget: sum(job.budget == budget for job in lab.jobs) for budget in (1, 3, 9, 27, 81)}
    assert reached == {1: 81, 3: 27 + 27, 9: 9 + 9 + 9, 27: 3 + 3 + 3 + 6, 81: 1 + 1 + 1 + 2 + 5}
    first = 0
    for count, budget in begun:
        assert {lab.jobs[i].budget for i, job in enumerate(lab.jobs) if first <= job.number < first + count} >= {budget}
        first += count


def test_the_best_of_each_rung_go_on():
    lab = Lab(method("hyperband")).run()
    bracket = lab.trials[:81]
    for budget, longer, count in ((1, 3, 27), (3, 9, 9), (9, 27, 3), (27, 81, 1)):
        there = sorted((trial for trial in bracket if budget in trial.losses), key=lambda trial: trial.losses[budget])
        assert {t.number for t in bracket if longer in t.losses} == {t.number for t in there[:count]}


def test_a_rung_of_hyperband_does_not_depend_on_which_trials_end_first():
    orders = (lambda step: 0, lambda step: 3 * step, lambda step: -1)
    ends = [Lab(method("hyperband"), 8).run(order).trials for order in orders]
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize(
    ("largest", "options", "budgets"),
    [
        (81, {}, (1, 3, 9, 27, 81)),
        (81, {"min_budget": 3}, (3, 9, 27, 81)),
        (100, {}, (1, 4, 11, 33, 100)),
        (20, {"eta": 2, "min_budget": 2}, (3, 5, 10, 20)),
        (5, {}, (2, 5)),
        (2, {}, (2,)),
    ],
)
def test_budgets_are_the_largest_divided_by_powers_of_eta(largest, options, budgets):
    assert METHODS["asha"](**options).budgets(largest) == budgets


def test_asha_lets_a_trial_go_on_as_soon_as_it_is_among_the_best_of_its_rung():
    """Li et al. 2020, Algorithm 2: the best third of what is in the rung so far; a new trial only if there is none."""
    lab = Lab(method("asha", trials=30))
    while lab.begin():
        job, trials = lab.jobs[-1], [trial for trial in lab.trials if trial.losses]
        able = {}
        for budget in (1, 3, 9, 27):
            there = sorted((t for t in trials if budget in t.losses), key=lambda trial: trial.losses[budget])
            able[budget] = [t.number for t in there[: len(there) // 3] if 3 * budget not in t.losses]
        if job.budget > 1:
            assert job.number in able[job.budget // 3]
            assert not any(able[budget] for budget in (3, 9, 27) if budget > job.budget // 3)
        else:
            assert not any(able.values())
        lab.end()
    done = [sum(budget in trial.losses for trial in lab.trials) for budget in (1, 3, 9, 27)]
    assert done[0] == 30
    assert all(longer >= rung // 3 for rung, longer in itertools.pairwise(done))


def test_asha_has_work_for_every_learner_before_any_rung_is_full():
    lab = Lab(method("asha", trials=100), parallel=16)
    while len(lab.trials) < 100:
        assert lab.begin()
        assert len(lab.running) == 16 or len(lab.trials) == 100
        lab.end(3)


@pytest.mark.parametrize("kind", ["tpe", "bohb"])
def test_a_model_of_the_results_finds_better_points_than_chance(kind):
    """Mean loss of proposals after the model has results, without the budget's part."""

    def mean(of, seed):
        lab = Lab(method(of, trials=40, seed=seed)).run()
        later = [job for job in lab.jobs if 20 <= job.number < 81 and (of != "bohb" or job.budget == 1)]
        return sum(loss(job.values, math.inf) for job in later) / len(later)

    assert sum(mean(kind, seed) < 0.75 * mean("random", seed) for seed in range(2)) == 2


def test_bohb_models_the_largest_budget_with_enough_results():
    searcher = method("bohb")
    good, bad = {"lr": 1e-2, "layers": 4, "optimizer": "adamw", "extra": None}, {"lr": 1e-4, "layers": 2}
    bad |= {"optimizer": "adamw", "extra": None}
    # enough are fields + 3: at 9 epochs there are, and at 27 is one too few
    many = [SearchTrial(n, good if n % 2 else bad, "paused", 9, {1: n % 2, 9: 1 - n % 2}) for n in range(8)]
    few = [SearchTrial(n, bad, "paused", 27, {9: 1.0, 27: 0.0}) for n in range(8, 15)]
    ranked = searcher._ranked(many + few)
    assert {trial.losses[9] for trial in ranked[:4]} == {0}
    assert len(ranked) == 15
    assert searcher._ranked(many[:7]) is None


# --- grids


def test_a_grid_has_every_combination_once_and_fields_only_where_their_conditions_hold():
    lab = Lab(method("grid")).run()
    points = [tuple(sorted((name, str(value)) for name, value in job.values.items())) for job in lab.jobs]
    assert len(points) == len(set(points)) == 4 * 4 * (1 + 3) * 2
    assert [job.values["lr"] for job in lab.jobs[:: len(points) // 4]] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert all(("momentum" in job.values) == (job.values["optimizer"] != "adamw") for job in lab.jobs)


def test_a_grid_that_cannot_be_exhausted_is_refused_with_the_field_and_the_remedy():
    with pytest.raises(SpaceError, match=r"search\.space\.lr: a grid cannot exhaust .*points.*another method"):
        method("grid", fields={"lr": {"low": 0.1, "high": 0.2}})
    with pytest.raises(SpaceError, match=r"more than 10 points.*search\.trials is 10.*search\.trials=0"):
        method("grid", trials=10)
    with pytest.raises(SpaceError, match=r"more than 100,000 points"):
        method("grid", fields={"seed": {"low": 0, "high": 1e9, "integer": True}})
