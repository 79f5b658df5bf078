"""What is to see of a search: its course, what is left, the importance of fields, plots, the page."""

import io
import json
import math
import re

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configurable.addresses import address_content
from tasks.search.analysis import course, importances, ranked, study_rungs, study_space
from tasks.search.config import SearchConfig
from tasks.search.driver import SearchDriver, WorkLeft, spent_budget, work_left
from tasks.search.methods import METHODS
from tasks.search.methods.base import TrialJob
from tasks.search.space import ParameterConfig
from tasks.search.study import Study, StudyError, StudyTrial, TrialOutcome
from tasks.tracking.search_plots import choice_text, study_plots
from tasks.tracking.search_report import (
    result_lines,
    search_result,
    study_artifacts,
    study_page,
    trial_columns,
    write_report,
)

SPACE = {
    "train.optimizer": ["adamw", {"kind": "sgd", "momentum": 0.95}],
    "train.optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True, "points": 3},
    "train.optimizer.nesterov": {"choices": [True, False], "when": {"train.optimizer": "sgd"}},
    "model.layers": {"low": 2, "high": 5, "integer": True},
    "model.dropout": {"low": 0.0, "high": 0.4, "points": 2},
    "train.max_batch": [16, 32, 64],
    "train.lora": [None, {"rank": 4, "alpha": 16, "modules": ["decoder.*"]}],
}
ALL = ["history", "importance", "parallel", "budgets", "rungs"]


class InMemory(Study):
    """A study without a database."""

    def __init__(self, about=(), space=SPACE):
        parameters = {name: ParameterConfig.model_validate(field) for name, field in space.items()}
        content = {"space": {name: address_content(field) for name, field in parameters.items()}}
        content = json.loads(json.dumps(content))
        super().__init__(
            None, "s", content, {"method": "random", "trials": 5, "minimize": "loss", **dict(about)}, 0.0, 60.0
        )

    def read(self):
        pass

    def note_seconds(self, seconds):
        pass

    stopping = False
    seeds = None

    def seeds_of(self, number):
        return self.seeds

    def begin(self, job):
        trial = StudyTrial(job.number, job.values, "running", job.budget)
        if job.number == len(self.trials):
            self.trials.append(trial)
        else:
            self._change_trial(job, state="running", budget=job.budget)

    def report(self, job, outcome, state):
        before = self.trials[job.number]
        at = float(sum(len(trial.losses) for trial in self.trials))
        self._change_trial(
            *(job,),
            state=state,
            trained=job.budget,
            losses={**before.losses, job.budget: outcome.loss},
            at={**before.at, job.budget: at},
        )

    def fail(self, job, error, seconds=0.0):
        self._change_trial(job, state="failed", error=error)

    def _change_trial(self, job, **changes):
        trial = self.trials[job.number]
        self.trials[job.number] = StudyTrial(**{**trial.to_dict(), **changes})


def loss(values, budget):
    return 0.2 + (math.log10(values["train.optimizer.lr"]) + 2) ** 2 + 0.1 * values["model.dropout"] + 1 / budget


def searched(method="hyperband", train=loss, largest=9, space=SPACE, **fields):
    """The study of a whole search, and its method."""
    search = SearchConfig.model_validate({"method": method, "space": space, "failures": 10_000, **fields})
    built = search.build(largest)
    about = {"method": built and search.method.kind, "trials": built.total, "work": built.work, "largest": largest}
    study = InMemory({**about, "restarts": search.method.restarts, "total_budget": search.total_budget}, space)
    outcome = lambda job, watch: TrialOutcome(train(job.values, job.budget))  # noqa: E731
    SearchDriver(study, built, search, largest, outcome).run()
    return study, built


def drawn(study, plots=None):
    """The pictures of all plots of a study, which are drawn unless they are given."""
    plots = list(study_plots(study)) if plots is None else plots
    assert [plot.name for plot in plots] == (ALL if study.trains else ALL[:3])
    assert all(plot.caption and plot.title for plot in plots)
    return {plot.name: matplotlib.image.imread(io.BytesIO(plot.image)) for plot in plots if plot.image}


def test_the_course_counts_the_epochs_of_all_trials():
    study, _ = searched()
    steps = course(study.trials)
    assert steps[-1].work == spent_budget(study.trials, False)
    assert [step.work for step in steps[:10]] == [*range(1, 10), 11]
    study, _ = searched({"kind": "hyperband", "rungs": "restart"})
    assert course(study.trials, restarts=True)[-1].work == spent_budget(study.trials, True)


@pytest.mark.parametrize("kind", [*METHODS, "restart"])
def test_a_method_says_how_many_epochs_it_will_train(kind):
    options = {"kind": "hyperband", "rungs": "restart"} if kind == "restart" else kind
    study, method = searched(options, trials=0 if kind in ("grid", "restart") else 20)
    spent = spent_budget(study.trials, kind == "restart")
    if kind == "asha":
        assert method.work <= spent <= 1.5 * method.work  # some go on too early
    else:
        assert method.work == spent
        assert work_left(study) == WorkLeft(spent, 0, 0.0)


def test_what_is_left_follows_from_the_rate_so_far_and_the_limits():
    study = InMemory({"work": 90})
    assert work_left(study) == WorkLeft(0, 90, None)
    study.trials = [
        StudyTrial(0, {}, "finished", 9, {9: 1.0}, 9),
        StudyTrial(1, {}, "failed", 9),
        StudyTrial(2, {}, "running", 9, {3: 1.0}, 3),
    ]
    assert work_left(study) == WorkLeft(9 + 3, 90 - 9 - 9 - 3, 60 / 12 * 69)
    assert work_left(study, 120.0).seconds == 120 / 12 * 69
    study.about["total_budget"] = 32
    assert work_left(study) == WorkLeft(12, 20, 100.0)
    study.about["hours"] = 100 / 3600
    assert work_left(study) == WorkLeft(12, 20, 40.0)
    assert str(work_left(study)) == "; about 0:00:40 left"
    assert str(WorkLeft(5, 0, 0.0)) == str(WorkLeft(0, 5, None)) == ""
    assert work_left(InMemory()) is None  # of a former version


def test_rungs_say_which_trials_went_on():
    study, _ = searched()
    rungs = study_rungs(study.trials)
    assert [(r.first, r.budget, len(r.went_on), len(r.stayed)) for r in rungs] == [
        *((1, 1, 3, 6), (1, 3, 1, 2), (1, 9, 0, 1)),
        *((3, 3, 1, 2), (3, 9, 0, 1)),
        (9, 9, 0, 3),
    ]
    for rung in rungs[:2]:
        assert max(t.losses[rung.budget] for t in rung.went_on) < min(t.losses[rung.budget] for t in rung.stayed)


def test_the_field_that_matters_is_the_most_important_and_the_others_are_chance():
    study, _ = searched("random", trials=150)
    found = importances(study_space(study), study.trials)
    assert (found.budget, found.results) == (9, 150)
    first, *others = found.fields
    assert first.field == "train.optimizer.lr"
    assert first.share > max(0.6, 2 * first.chance)
    assert all(field.share <= 1.5 * field.chance for field in others)
    assert math.isclose(sum(field.share for field in found.fields), 1)
    assert {field.field for field in found.fields} == SPACE.keys()


def test_importance_needs_enough_results_after_the_same_budget():
    study, _ = searched("random", trials=19)
    assert importances(study_space(study), study.trials) is None
    assert "there are 19 so far" in [plot.caption for plot in study_plots(study)][1]
    study, _ = searched("asha", trials=30)
    assert importances(study_space(study), study.trials).budget == 1


def test_all_plots_of_a_search_with_rungs_are_drawn():
    study, _ = searched("bohb", largest=27)
    images = drawn(study)
    assert list(images) == ALL
    for image in images.values():
        assert image.shape[1] == 1100
        assert image.shape[0] > 180
        assert image[..., :3].std() > 0.03


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [("running", {})],
        [("failed", {})],
        [("failed", {}), ("finished", {9: 1.0})],
        [("finished", {9: 1.0})],
        [("finished", {9: 1.0}), ("finished", {9: 1.0})],
        [("paused", {1: 0.0}), ("finished", {1: 0.0, 3: 0.0, 9: 0.0})],
        [("paused", {1: 1e300}), ("finished", {1: 2.0, 3: -1.0, 9: 1e-300})],
    ],
)
@pytest.mark.variants(3)
def test_any_study_is_drawn(trials):
    study = InMemory()
    values = {"train.optimizer": "adamw", "train.optimizer.lr": 1e-4, "model.layers": 5, "model.dropout": 0.4}
    values |= {"train.max_batch": 16, "train.lora": {"rank": 4, "alpha": 16, "modules": ["decoder.*"]}}
    study.trials = [
        StudyTrial(number, values, state, max(losses, default=9), losses, max(losses, default=0), "x\ny")
        for number, (state, losses) in enumerate(trials)
    ]
    plots = list(study_plots(study))
    assert ("history" in drawn(study, plots)) == any(losses for _, losses in trials)
    assert study_page(study, search_result(study), plots).endswith("</html>")


@settings(max_examples=5)
@given(st.lists(st.floats(-1e3, 1e6), min_size=1, max_size=12), st.data())
def test_any_losses_are_drawn(losses, data):
    study = InMemory(space={"a": {"low": 1.0, "high": 2.0}})
    for number, found in enumerate(losses):
        budgets = data.draw(st.sets(st.sampled_from([1, 3, 9]), min_size=1))
        study.trials.append(
            StudyTrial(number, {"a": 1.5}, "paused", max(budgets), dict.fromkeys(budgets, found), max(budgets))
        )
    assert {"history", "parallel"} <= drawn(study).keys()


@pytest.mark.slow
def test_thousands_of_trials_of_many_fields_are_drawn():
    space = {f"model.field_{number}": {"low": 0.0, "high": 1.0} for number in range(8)}
    space["model.many"] = [{"kind": f"a rather long kind {number}"} for number in range(40)]
    study, rng = InMemory(space=space), np.random.default_rng(1)
    parameters = study_space(study)
    for number in range(3_000):
        budgets = [1, 3, 9][: 1 + (number % 3 == 0) + (number % 9 == 0)]
        losses = {budget: float(rng.lognormal()) for budget in budgets}
        study.trials.append(StudyTrial(number, parameters.draw(rng), "paused", budgets[-1], losses, budgets[-1]))
    plots = list(study_plots(study))
    assert all(1000 < len(plot.image) < 3_000_000 for plot in plots)
    assert "600 of 3,000 trials are drawn" in plots[2].caption
    page = study_page(study, search_result(study), plots)
    assert "2,000 more are listed" in page
    assert len(page) < 4_000_000


def test_a_search_over_decoding_is_drawn_by_the_number_of_trials_and_without_epochs(tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    space = {"decode.lm_weight": {"low": 0.0, "high": 4.0}, "decode.beam": [4, 8]}
    search = SearchConfig.model_validate({"method": "tpe", "space": space, "minimize": "wer", "trials": 25})
    method = search.build(0)
    about = {"trials": method.total, "work": method.work, "largest": 0, "minimize": "wer"}
    study = InMemory(about, space)

    def decoded(job, watch):
        if job.number == 3:
            raise ValueError("no path")
        return TrialOutcome(0.2 + abs(job.values["decode.lm_weight"] - 1.0))

    driver = SearchDriver(study, method, search, 0, decoded)
    driver.run()
    assert [step.work for step in course(study.trials)] == list(range(1, 25))
    assert list(drawn(study)) == ALL[:3]
    report = write_report(study)
    said = "\n".join(
        (*(plot.caption for plot in report.plots), *result_lines(report.result), *trial_columns(study, []))
    )
    assert "of 24 results (PED-ANOVA)" in said
    assert "searched for 0:01:00" in said
    assert "epoch" not in said + re.sub(r"<[^>]*>", "", report.path.read_text())
    assert work_left(study) == WorkLeft(25, 0, 0.0)
    study.about["trials"] = 30
    assert result_lines(search_result(study))[1] == "searched for 0:01:00; about 0:00:12 left"


def with_seeds(study, losses):
    """Other seeds of the best trial, and what they have given."""
    study.seeds = InMemory({"trials": len(losses) + 1, "largest": 9})
    study.seeds.trials = [
        StudyTrial(n, {"train.seed": n + 2}, "finished", 9, {9: loss}, 9, figures={9: {}})
        for n, loss in enumerate(losses)
    ]
    number = len(losses)
    study.seeds.trials.append(StudyTrial(number, {"train.seed": number + 2}, "failed", 9, error="it <diverged>\nthere"))


def test_the_report_has_mean_and_spread_of_seeds_and_marks_trials_that_are_equal_to_the_best(tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    study = InMemory({"method": "random"}, {"train.max_batch": [16, 32, 64]})
    study.trials = [
        StudyTrial(n, {"train.max_batch": 16 << n}, "finished", 9, {9: loss}, 9)
        for n, loss in enumerate((0.5, 0.51, 0.6))
    ]
    before = study_plots(study)
    plain = next(before)
    assert "equal to" not in plain.caption + write_report(study).path.read_text()
    with_seeds(study, [0.52, 0.54])  # differ by 0.02 as a root mean square
    report = write_report(study)
    page = report.path.read_text()
    assert report.plots[0].image != plain.image
    assert "Results after 9 epochs within the band are equal to it" in report.plots[0].caption
    rows = re.findall(r"<td>(mean|standard deviation|\d)</td><td class=n>([\d.]*)</td><td>([^<]*)</td>", page)
    assert rows[:3] == [("2", "0.5200", ""), ("3", "0.5400", ""), ("4", "", "it &lt;diverged&gt;")]
    assert dict(row[:2] for row in rows)["mean"] == "0.5300"
    assert dict(row[:2] for row in rows)["standard deviation"] == "0.0141"
    assert re.findall(r"<td>(\d)( =)?</td><td>finished", page) == [("0", ""), ("1", " ="), ("2", "")]
    assert "= differs from the best trial by less than trainings with other seeds do, 0.0200" in page
    _, table, *_ = study_artifacts(study, report, "")
    assert [row["trial"] for row in table.content] == ["0", "1 =", "2"]
    assert table.description.endswith("other seeds do, 0.0200")


def test_trainings_with_other_seeds_are_in_the_report_of_their_search():
    study = InMemory()
    del study.content["space"]
    with pytest.raises(StudyError, match="in the report of their search"):
        write_report(study)


def test_texts_of_choices_fit_between_two_axes():
    assert choice_text(None) == "none"
    assert choice_text({"kind": "sgd", "momentum": 0.95}) == "sgd\nmomentum=0.95"
    assert choice_text({"rank": 4, "alpha": 16}) == "rank=4, alpha…"
    assert choice_text("conformer-of-a-long-name") == "conformer-of-…"
    assert choice_text({}) == "{}"


def test_labels_are_inside_the_figure(monkeypatch):
    from tasks.tracking import search_plots as module

    figures = []
    monkeypatch.setattr(module, "png", lambda figure: figures.append(figure) or b"x")
    study, _ = searched("bohb", train=lambda v, b: math.nan if v["model.layers"] == 5 else loss(v, b), trials=60)
    list(study_plots(study))
    assert len(figures) == 5
    for figure in figures:
        figure.draw_without_rendering()
        width, height = figure.get_size_inches() * figure.dpi
        for axes in figure.axes:
            named = [] if len(axes.get_yticks()) else axes.get_xticklabels()  # elsewhere some are outside of the panel
            parts = [axes.xaxis.label, axes.yaxis.label, *named, *axes.texts, axes.get_legend()]
            for part in parts:
                if part is not None:
                    box = part.get_window_extent()
                    assert -1 <= box.x0 <= box.x1 <= width + 1, part
                    assert -1 <= box.y0 <= box.y1 <= height + 1, part


def test_the_page_shows_the_best_values_all_trials_and_nothing_of_a_value_as_html(tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    study, _ = searched("random", trials=5)
    study.name = "a/b"
    study.fail(TrialJob(4, study.trials[4].values, 9), "<script>no</script>\nmore")
    report = write_report(study)
    assert report.path == tmp_path / "reports" / "search-a%2Fb.html"
    page = report.path.read_text()
    assert page.count("<script>") == 1
    assert "&lt;script&gt;no" in page
    assert re.findall(r'src="([^,"]+),', page) == ["data:image/png;base64"] * 2
    for name, value in study.best.values.items():
        assert name in page
        assert f"{value:.6g}"[:6] in page if isinstance(value, float) else True
    assert sorted(report.files()) == ["history.png", "parallel.png", "report.html"]


def test_trials_are_listed_the_best_first_and_those_without_a_result_last():
    study = InMemory()
    study.trials = [
        StudyTrial(0, {}, "failed", 9, error="a\nb"),
        StudyTrial(1, {"x": 1}, "paused", 1, {1: 0.1}, 1),
        StudyTrial(2, {"x": {"kind": "sgd"}}, "finished", 9, {1: 2.0, 9: 0.5}, 9),
    ]
    assert [trial.number for trial in ranked(study.trials)] == [2, 1, 0]
    columns = trial_columns(study, ranked(study.trials))
    assert columns["loss"] == ["0.5000", "0.1000", ""]
    assert columns["x"] == ["{kind: sgd}", "1", ""]
    assert columns["error"] == ["", "", "a"]
    assert columns["trial"] == ["2", "1", "0"]
    assert trial_columns(study, study.trials, [1])["trial"] == ["0", "1 =", "2"]
    assert result_lines(search_result(study))[0] == "s: random, 3 of 5 trials (1 finished, 1 paused, 1 failed)"
    assert result_lines(json.loads(json.dumps(search_result(study))))[2].endswith("loss 0.5000 after 9 epochs")
