"""The bookkeeping of the experiments: the file of results, the criterion of convergence, and the tables."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from regression import Regression

from benchmarks import experiment_plans as plans
from benchmarks import experiment_report as report
from benchmarks import experiments
from benchmarks.experiment_runs import Results, Run, train

ROOT = Path(__file__).resolve().parents[3]
RUN = Run("scpsgd", 2, 8, 0.1, looks=1)


class Counted:
    """Makes problems of a run's learning rate, and counts them."""

    def __init__(self):
        self.made = 0

    def __call__(self, run):
        self.made += 1
        return Regression(batches=4, epochs=2, lr=run.lr)


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "folder" / "results.jsonl")


def outcome(run, loss, **fields):
    """A record as `train` makes it."""
    wer = None if loss is None else min(1.0, loss / 4)
    shared = {"seconds": 10.0, "staleness": 1.0, "consensus": 0.01, "bytes": 2e6, "cpu_s": 0.0}
    return {"run": asdict(run), "loss": loss, "wer": wer, "curve": [], **(shared if loss is not None else {}), **fields}


def fill(results, runs, losses):
    for run, loss in zip(runs, losses, strict=True):
        results.add(outcome(run, loss))


def test_finished_run_is_not_repeated(results):
    problems = Counted()
    made = results.ensure(RUN, problems)
    assert Results(results.path).ensure(RUN, problems) == made
    assert results.ensure(replace(RUN, lr=0.2), problems) != made
    assert problems.made == 2
    assert len(results.path.read_text().splitlines()) == 2


def test_run_with_a_torn_line_is_repeated_and_later_lines_are_whole(results):
    problems = Counted()
    results.ensure(RUN, problems)
    other = replace(RUN, lr=0.2)
    results.ensure(other, problems)
    text = results.path.read_text()
    results.path.write_text(text[:-30])
    again = Results(results.path)
    assert again.get(RUN) is not None
    assert again.get(other) is None
    again.ensure(other, problems)
    assert problems.made == 3
    assert Results(results.path).get(other) is not None


def test_a_record_has_the_settings_the_figures_and_a_curve(results):
    record = results.ensure(replace(RUN, strategy="adpsgd", options=("neighbours=random-ring",), slow=3.0), Counted())
    assert record["run"]["options"] == ["neighbours=random-ring"]
    assert 0 < record["loss"] < 10
    assert len(record["curve"]) == 3
    assert record["curve"][-1][2] == record["loss"]
    assert record["seconds"] >= record["curve"][0][0] > 0


def test_run_with_nan_loss_stops_and_is_recorded_as_diverged(results):
    problem = Regression(batches=4, epochs=10_000, lr=1e30)
    record = train(RUN, lambda run: problem)
    assert record["loss"] is None
    assert record["wer"] is None
    assert len(problem.seen) < 1000
    results.add(record)
    assert not plans.converged(Results(results.path).get(RUN))


def test_training_has_converged_below_half_the_loss_of_chance():
    assert plans.converged(outcome(RUN, 0.49 * math.log(10)))
    assert not plans.converged(outcome(RUN, 0.51 * math.log(10)))
    assert not plans.converged(None)


@pytest.mark.parametrize(
    ("losses", "tried"),
    [
        ([0.9, 0.5, 0.2, 0.6, 0.7], [2, 3, 1]),  # worse on both sides of the middle
        ([0.9, 0.5, 0.4, 0.3, 0.7], [2, 3, 4, 1]),
        ([0.1, 0.2, 0.4, 0.6, 0.7], [2, 3, 1, 0]),
        ([3.0, 3.0, 3.0, 3.0, 3.0], [2, 3, 4, 1, 0]),  # nothing converges: all are tried
        ([0.3, 3.0, None, 3.0, 3.0], [2, 3, 4, 1, 0]),
        ([3.0, 3.0, 3.0, None, 0.1], [2, 3, 1, 0]),  # beyond a rate that diverged nothing is tried
    ],
)
def test_learning_rates_are_tried_outwards_while_the_loss_falls(results, losses, tried):
    runs = plans.Sweep().runs(64, plans.Choice("scpsgd"))
    fill(results, runs, losses)
    assert [
        runs.index(Run(**{**record["run"], "options": ()})) for record in plans.sweep(runs, results, Counted())
    ] == tried


def test_time_to_a_loss_is_that_of_the_first_evaluation_below_it():
    curve = [
        [1.0, 0.5, 2.0, 1.0, 0.1],
        [2.0, 1.0, None, None, 0.1],
        [3.0, 1.5, 0.5, 0.3, 0.1],
        [4.0, 2.0, 0.6, 0.3, 0.1],
    ]
    record = outcome(RUN, 0.6, curve=curve)
    assert plans.time_to(record, 0.5) == 3.0
    assert plans.time_to(record, 0.4) is None


def test_the_headline_is_the_largest_batch_whose_best_rate_converged(results):
    sweep = plans.SWEEPS["headline"]
    for batch, losses in ((64, [3.0, 0.2]), (128, [0.3, 9.0]), (256, [None, 3.0])):
        fill(results, sweep.runs(batch, plans.HEADLINE[0])[:2], losses)
    fill(results, sweep.runs(64, plans.HEADLINE[-1])[:1], [None])
    rows = report.sweep_rows(results)
    assert [(row["method"], row["batch"], row["lr"], row["converged"]) for row in rows] == [
        ("scpsgd", 64, plans.RATES[1], True),
        ("bmuf (plain SGD)", 64, None, False),
        ("scpsgd", 128, plans.RATES[0], True),
        ("scpsgd", 256, plans.RATES[1], False),
    ]
    assert report.largest_batches(results) == {"scpsgd": 128, "bmuf (plain SGD)": None}
    assert report.sweep_rows(results, "unclipped") == []


def test_each_sweep_has_its_own_clipping_epochs_and_batches(results):
    (unclipped, longer) = (plans.SWEEPS[name] for name in ("unclipped", "longer"))
    assert {(run.clip, run.epochs, run.learners) for run in unclipped.runs(64, plans.HEADLINE[1])} == {(0.0, 16, 16)}
    (run, *others) = longer.runs(256, plans.HEADLINE[1])
    assert ({run.clip, *(other.clip for other in others)}, run.epochs, run.batch) == ({5.0}, 48, 256)
    assert run.method == "adpsgd ring per_step=1"
    results.add(outcome(run, 0.25))
    assert [(row["method"], row["staleness"], row["consensus"]) for row in report.sweep_rows(results, "longer")] == [
        ("adpsgd ring per_step=1", 1.0, 0.01)
    ]


def test_other_seeds_use_the_best_learning_rate(results):
    method = plans.HEADLINE[2]
    sweep = plans.SWEEPS["headline"]
    runs = sweep.runs(256, method)
    assert plans.seeds(sweep, 256, method, results) == []
    fill(results, runs[:2], [None, None])
    assert plans.seeds(sweep, 256, method, results) == []
    fill(results, runs[2:4], [0.3, 0.2])
    repeated = plans.seeds(sweep, 256, method, results)
    assert [(run.seed, run.lr) for run in repeated] == [(seed, runs[3].lr) for seed in plans.SEEDS]
    fill(results, repeated[1:], [0.5, None])
    (row,) = report.seed_rows(results)
    assert (row["loss"], row["errors"]) == ("0.20 / 0.50 / –", "5.0 / 12.5 / –")


def test_segments_are_judged_by_frames(results):
    sweep = plans.SWEEPS["segments"]
    method, (batch,) = sweep.choices[1], sweep.repeated
    runs = sweep.runs(batch, method)
    assert {run.data for run in runs} == {"segments"}
    for run, accuracy in ((runs[0], 0.5), (runs[1], 0.4), (replace(runs[0], seed=2), 0.45)):
        results.add(outcome(run, 3 - accuracy, wer=None, frame_accuracy=accuracy))
    (row,) = report.sweep_rows(results, "segments")
    assert (row["lr"], row["converged"], row["frame_accuracy"]) == (runs[0].lr, True, 0.5)
    assert report.seed_rows(results) == []
    (row,) = report.seed_rows(results, "segments")
    assert (row["frame_loss"], row["right"]) == ("2.50 / 2.55", "50.0 / 45.0")
    assert f"**2.50, frames right 50.0 %, at {runs[0].lr:g}**" in report.tables(results)


def test_slow_learner_is_compared_with_equal_ones_at_the_same_rate(results):
    runs = plans.strategies(plans.Choice("easgd"))
    fill(results, runs[:2], [3.0, 0.3])
    results.add(outcome(replace(runs[1], slow=plans.SLOW), None))
    rows = report.strategy_rows(results)
    assert [(row["condition"], row["lr"], row["loss"]) for row in rows] == [
        ("equal", runs[1].lr, 0.3),
        ("one 10x slower", runs[1].lr, None),
    ]
    assert rows[0]["megabytes"] == 2.0


def test_newcomers_are_evaluated_in_the_epoch_after_joining(results):
    runs = plans.newcomers(plans.NEWCOMER_RECIPES[0], 4, "weights")
    assert [join.rank for join in runs[0].cluster.joins] == [4, 5, 6, 7]
    at = runs[0].join_s
    looks = [(-1, 9.75, 9.0, 9.0), (1, 10.0, 0.1, 0.001), (5, 11.0, 0.3, 0.002), (9, 11.25, 9.0, 9.0)]
    results.add(outcome(runs[0], 0.05, curve=[[at + s, epochs, loss, 0.1, far] for s, epochs, loss, far in looks]))
    results.add(outcome(runs[1], None))
    (row,) = report.newcomer_rows(results)
    assert (row["join"], row["after"], row["consensus"], row["loss"]) == ("4 of 8", "0.200", "2.000", "0.050")
    assert "| 4 of 8 | weights | 2.000 |" in report.tables(results)


def test_learners_may_join_during_an_experiment():
    there, late = (train(replace(RUN, strategy="adpsgd", late=n, join_s=0.5), Counted()) for n in (0, 1))
    assert late["seconds"] > there["seconds"]
    assert late["loss"] is not None


def test_confidence_interval_contains_the_error_rate_also_for_zero_errors():
    low, high = report.interval(0.1, 360)
    assert low < 0.1 < high < 0.14
    assert report.interval(0.0, 360) == (0.0, pytest.approx(0.0106, abs=1e-3))


def test_the_results_are_shown_without_running_anything(results, capsys, monkeypatch):
    fill(results, plans.rings()[:2], [0.1, 0.2])
    fill(results, plans.rings(seed=2)[:1], [0.3])
    monkeypatch.setattr("sys.argv", ["experiments", "--json", "--tables", "--results", str(results.path)])
    experiments.main()
    shown, _, table = capsys.readouterr().out.partition("\n")
    once, four = "adpsgd ring per_step=1", "adpsgd ring per_step=4"
    rows = [(row["method"], row["learners"], row["seed"]) for row in json.loads(shown)["rings"]]
    assert rows == [(once, 8, 1), (four, 8, 1), (once, 64, 2)]
    assert f"| {once} | 8 | 1 |" in table


def test_tables_of_the_document_are_parts_of_those_of_the_committed_results():
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    lines = {line for line in report.tables(Results(experiments.RESULTS)).splitlines() if line.startswith("|")}
    shown = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    of_results = [table for table in shown if table[0] in lines]
    assert len(of_results) == len(shown) - 2  # the settings, and the losses by learning rate
    assert [line for table in of_results for line in table if line not in lines] == []


@pytest.mark.slow
def test_pictures_are_drawn(results, tmp_path):
    from benchmarks.experiment_plots import draw

    paths = draw(Results(experiments.RESULTS), tmp_path)
    assert [path.name for path in paths] == [
        f"experiment-{figure}.png" for figure in ("headline", "rates", "strategies", "rings")
    ]
    assert all(path.stat().st_size > 10_000 for path in paths)
