"""The benchmark of search: budgets are counted, trainings are shared, and tables say what was reached."""

import argparse
import json
import math

import pytest
from support import tiny_document

from benchmarks import search as module
from benchmarks.search import METHODS, SPACE, Trainings, compared, lowest, run_scale, search_config, searched, surrogate
from tasks.search.methods.base import TrialJob

VALUES = {"train.optimizer.lr": 2e-3, "train.max_batch": 16, "model.dropout": 0.1}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gets_the_same_budget(method):
    course = searched(search_config(method, 1), 9, 90, surrogate)
    assert 90 <= course[-1][0] < 90 + 9 or method == "grid"
    losses = [loss for _, loss in course]
    assert losses == sorted(losses, reverse=True)
    assert lowest(course, 90) < 0.5
    assert math.isnan(lowest(course, 0))


def test_the_surface_gives_a_training_the_same_loss_whoever_asks_and_less_after_more_epochs():
    losses = [surrogate(TrialJob(number, VALUES, budget)) for number, budget in enumerate((1, 3, 9, 27, 27))]
    assert losses == sorted(losses, reverse=True)
    assert losses[3] == losses[4]
    assert math.isnan(surrogate(TrialJob(0, VALUES | {"train.optimizer.lr": 0.03}, 1)))


def test_a_method_that_needs_less_budget_is_said_to():
    courses = {"random": [[(10, 2.0), (100, 1.0)]], "asha": [[(10, 1.0), (50, 0.5)]], "grid": [[(100, 3.0)]]}
    rows = {row["method"]: row for row in compared(courses, 100)}
    assert rows["asha"]["share_of_budget_for_randoms_loss"] == 0.1
    assert rows["random"]["share_of_budget_for_randoms_loss"] == 1.0
    assert rows["grid"]["share_of_budget_for_randoms_loss"] is None
    assert rows["asha"]["loss"] == 0.5


def test_a_training_is_done_once_and_answers_for_all_shorter_ones(tmp_path, monkeypatch):
    config, path, trained = tmp_path / "a.json", tmp_path / "losses.jsonl", []
    config.write_text(json.dumps(tiny_document()))
    monkeypatch.setattr(module, "CONFIG", config)

    def train(self, values, epochs, before):
        trained.append((epochs, before))
        return [3.0, 1.0, 2.0, 0.5][:epochs]

    monkeypatch.setattr(Trainings, "_train", train)
    trainings = Trainings(path, (), dry=False)
    assert [trainings(TrialJob(0, VALUES, budget)) for budget in (1, 3, 2)] == [3.0, 1.0, 1.0]
    assert trained == [(1, 0), (3, 1)]
    again = Trainings(path, (), dry=False)
    assert [again(TrialJob(5, VALUES, budget)) for budget in (2, 4)] == [1.0, 0.5]
    assert (trained[2:], again.epochs) == ([(4, 3)], 1)
    assert Trainings(path, ["train.batch_seconds=7"], dry=False)(TrialJob(0, VALUES, 1)) == 3.0
    assert trained[3:] == [(1, 0)]
    dry = Trainings(path, (), dry=True)
    assert dry(TrialJob(0, VALUES, 27)) == surrogate(TrialJob(0, VALUES, 27))
    assert (dry.epochs, len(trained)) == (27, 4)


@pytest.mark.real_interpreter
def test_the_cost_of_many_trials_is_measured(capsys):
    run_scale(argparse.Namespace(methods=["asha"], trials=40))
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert row["trials"] == 40
    assert row["results"] > 40
    assert row["study_mb"] > 0
    assert SPACE.keys() == VALUES.keys()
