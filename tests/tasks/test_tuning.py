"""Tuning chooses among the values that a method of search proposes; ties are broken by rules."""

import pytest
from support import tiny_document

from speech.scoring import ErrorCounts
from tasks.config.pipeline import parse_config
from tasks.search.methods import METHODS
from tasks.search.methods.base import SearchPlan, all_trials
from tasks.search.space import ParameterConfig, Space
from tasks.stages import tuning
from tasks.stages.base import Run
from tasks.stages.tuning import DecodedTrial, best_trial, tuned_inputs

SPACE = Space({"a": ParameterConfig(choices=[0.0, 1.0, 2.0]), "b": ParameterConfig(choices=[0.0, 1.0])})


def trial(a, b, sub=1, char_errors=3):
    return DecodedTrial({"a": a, "b": b}, ErrorCounts(cor=5, sub=sub, char_errors=char_errors))


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        ([trial(0.0, 0.0), trial(2.0, 1.0, sub=0, char_errors=9)], (2.0, 1.0)),  # fewest word errors
        ([trial(1.0, 0.0), trial(2.0, 1.0, char_errors=2)], (2.0, 1.0)),  # then fewest character errors
        ([trial(0.0, 1.0), trial(2.0, 1.0), trial(1.0, 1.0)], (1.0, 1.0)),  # then nearest to what is configured
        ([trial(0.0, 0.0), trial(2.0, 0.0)], (0.0, 0.0)),  # then the first
    ],
)
def test_ties_are_broken_by_rules(trials, best):
    assert tuple(best_trial(trials, SPACE, {"a": 1.0, "b": 0.0}).values.values()) == best


@pytest.mark.parametrize(
    ("parameter", "value", "other", "steps"),
    [
        ({"choices": [0.5, 1.0, 8.0]}, 8.0, 0.5, 2),
        ({"low": 0.0, "high": 4.0, "points": 5}, 1.0, 3.0, 2),
        ({"low": 1, "high": 100, "log": True, "points": 3}, 10, 100, 1),
        ({"low": 0.0, "high": 4.0}, 1.0, 9.0, 0.75),  # what is outside counts as the end
        ({"low": 1, "high": 100, "log": True}, 10, 0, 0.5),
    ],
)
def test_steps_between_values_are_those_of_a_grid(parameter, value, other, steps):
    assert ParameterConfig.model_validate(parameter).steps(value, other) == pytest.approx(steps)


def test_a_search_without_training_tries_each_point_of_a_grid_once():
    seen = []

    def loss(values):
        seen.append(values)
        return values["a"]

    trials = all_trials(METHODS["grid"]().build(SearchPlan(SPACE, 0)), loss)
    assert seen == [{"a": a, "b": b} for a in (0.0, 1.0, 2.0) for b in (0.0, 1.0)]
    assert [(trial.values, trial.losses, trial.budget) for trial in trials] == [(v, {0: v["a"]}, 0) for v in seen]


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_other_methods_propose_the_same_again_and_come_nearer(kind):
    space = Space({"a": ParameterConfig(low=-4.0, high=4.0)})
    searches = [
        [(t.values["a"], t.losses[0]) for t in all_trials(METHODS[kind]().build(SearchPlan(space, 0, 25)), distance)]
        for _ in range(2)
    ]
    assert searches[0] == searches[1]
    assert len(searches[0]) == 25
    assert min(loss for _, loss in searches[0]) < 0.5


def distance(values):
    return abs(values["a"] - 1.0)


def run(**tune):
    decode = {"kind": "words", "lm": "x.arpa"}
    return Run(parse_config(tiny_document(decode=decode, tune=tune)), "r")


def test_addresses_of_tuned_decoding_hold_the_values_of_a_grid_however_they_are_written(monkeypatch):
    monkeypatch.setattr(tuning, "check_tuning", lambda run: None)
    suggested = {"lm_weight": [0.5, 1.0, 1.5, 2.0, 3.0, 4.0], "word_score": [-1.0, 0.0, 1.0, 2.0]}
    assert tuned_inputs(run()) == {"tune": {}, "grid": suggested}  # as before other methods: nothing is made again
    named = {"lm_weight": [1.0, 3.0]}
    assert tuned_inputs(run(grid=named)) == tuned_inputs(run(space=named)) == {
        "tune": {}, "grid": {"lm_weight": [1.0, 1.5, 3.0]}
    }  # fmt: skip
    drawn = tuned_inputs(run(method="random", space={"lm_weight": {"low": 0.0, "high": 4.0}}))
    assert drawn == {
        "tune": {"method": {"kind": "random"}, "seed": 1},
        "grid": {"lm_weight": {"low": 0.0, "high": 4.0}},
    }
