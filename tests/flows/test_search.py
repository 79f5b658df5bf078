"""The flow `search` and the command `starling search`, with trainings that only compute a loss."""

import json
import math
import re
from pathlib import Path

import pytest
from command_line import invoke
from support import give_mlflow, tiny_document

from flows import search as module
from flows.search import SearchDisplay, run_search, search_result, study_content
from storage.retries import DiskError
from tasks.config.pipeline import parse_config
from tasks.locking.slots import SlotTakenError
from tasks.orchestration import stage_tasks
from tasks.orchestration.stage_tasks import open_run
from tasks.search.driver import SearchFailedError
from tasks.search.study import Studies, StudyError
from tasks.stages import progress
from tasks.stages.base import StageResult
from tasks.stages.paused import paused_output
from tasks.tracking import search_tracking
from tasks.tracking.runs import client

LR = {"train.optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}}


@pytest.fixture(autouse=True)
def untracked(home, monkeypatch):
    """No MLflow; its errors must not matter. No plots, which take a second."""

    def unreachable():
        raise ConnectionError("no MLflow")

    monkeypatch.setattr(search_tracking, "client", unreachable)
    monkeypatch.setattr(module.Trials, "draw", lambda trials: None)


def searched(method="hyperband", epochs=9, **fields):
    document = tiny_document()
    document["train"] |= {"epochs": epochs}
    return parse_config(document | {"search": {"method": method, "space": LR, **fields}})


class Shown(SearchDisplay):
    """Remembers what is shown."""

    def __init__(self):
        self.shares, self.notes, self.artifacts = [], [], []

    def progress(self, done, total, note):
        self.shares.append(done / total)
        self.notes.append(note)

    def publish(self, artifacts):
        self.artifacts = list(artifacts)


class Lab:
    """Stands for the stages: remembers what was to be trained, and gives a loss.

    Args:
        spoil: Called with each run; may raise.
        size: Bytes of what a paused training keeps.
    """

    def __init__(self, spoil=lambda run: None, size=10):
        self.runs, self.prepared, self.spoil, self.size = [], [], spoil, size
        self.display = Shown()

    def execute(self, run):
        self.runs.append(run)
        run.trial.watch()
        self.spoil(run)
        train = run.config.train
        valid = {"loss": (math.log10(train.optimizer.lr) + 2) ** 2 + 1 / train.epochs, "wer": None}
        key = f"{abs(hash((train.optimizer.lr, train.epochs))):016x}"[:16]
        run.results["train"] = StageResult("train", key, "", 0.0, False, {}, {"result": {"valid": valid}})
        if run.trial.keep:
            paused = paused_output(run.store, key)
            paused.store.write("checkpoint", b"0" * self.size)
            paused.publish({"counts": {}})
        return run

    def search(self, config):
        return run_search(config, "s-1", "", self.prepared.append, self.execute, self.display)


def kept(config):
    """Numbers of the trials whose checkpoints are kept and have a record, and of those that have none any more."""
    trials, with_record, without = Studies().open("tiny").trials, set(), set()
    store = module.Run(config, "r").store
    for trial in trials:
        for figures in trial.figures.values():
            output = paused_output(store, figures["training"])
            if output.store.list():
                (with_record if output.record() else without).add(trial.number)
    return with_record, without


def test_a_search_trains_each_part_of_each_trial_once_and_ends_with_the_best():
    lab, config = Lab(), searched()
    result = lab.search(config)
    assert [run.search for run in lab.prepared] == [None]
    assert result["complete"]
    assert result["trials"] == {"finished": 5, "paused": 10, "running": 0, "failed": 0}
    assert result["planned"] == 15
    assert result["epochs"] == sum(run.config.train.epochs - run.trial.trained for run in lab.runs)
    parts = [(run.run_id, run.config.train.epochs) for run in lab.runs]
    assert len(parts) == len(set(parts))
    assert {run.trial.trained for run in lab.runs if run.config.train.epochs == 9} == {0, 3}
    assert all(run.trial.keep == (run.config.train.epochs < 9) for run in lab.runs)
    best = result["best"]
    assert best["losses"][9] == min(t.losses[9] for t in Studies().open("tiny").trials if 9 in t.losses)
    again = Lab()
    assert again.search(config)["best"] == best
    assert again.runs == []
    assert json.loads(json.dumps(result))["best"]["number"] == best["number"]


def test_trials_of_restarted_rungs_neither_continue_nor_keep_anything():
    lab = Lab()
    lab.search(searched({"kind": "hyperband", "rungs": "restart"}))
    assert {(run.trial.trained, run.trial.keep) for run in lab.runs} == {(0, False)}


def test_checkpoints_are_kept_while_a_trial_may_go_on_and_left_to_garbage_collection_at_the_end():
    config = searched(total_epochs=10)
    Lab().search(config)
    study = Studies().open("tiny")
    with_record, without = kept(config)
    assert with_record == {trial.number for trial in study.trials if trial.state == "paused"}
    assert not without
    whole = searched()
    Lab().search(whole)
    study = Studies().open("tiny")
    assert kept(whole) == (set(), {trial.number for trial in study.trials if trial.state == "paused"})


def test_checkpoints_beyond_the_quota_are_those_of_the_worst_trials():
    config = searched(total_epochs=9)
    Lab().search(config)
    store = module.Run(config, "r").store

    def paused(trial):
        return paused_output(store, trial.figures[1]["training"])

    size = sum(entry.size for entry in paused(Studies().open("tiny").trials[0]).store.entries())
    Lab().search(searched(total_epochs=9, keep_gb=3.5 * size / 1e9, study="other"))
    trials = sorted(Studies().open("other").trials, key=lambda trial: trial.losses[1])
    assert [bool(paused(trial).record()) for trial in trials] == [True] * 3 + [False] * 6


def test_a_trial_that_fails_is_kept_with_its_error_and_a_full_disk_ends_the_search():
    def spoil(run):
        if run.run_id.endswith("-3"):
            raise ValueError("it diverged")
        if run.run_id.endswith("-7"):
            raise DiskError("the disk is full")

    config = searched("random", trials=10)
    with pytest.raises(DiskError, match="the disk is full"):
        Lab(spoil).search(config)
    study = Studies().open("tiny")
    assert (study.trials[3].state, study.trials[3].error) == ("failed", "it diverged")
    assert study.trials[7].state == "running"
    lab = Lab()
    result = lab.search(config)
    assert lab.runs[0].run_id.endswith("-7")
    assert result["trials"] == {"finished": 9, "paused": 0, "running": 0, "failed": 1}


def test_a_figure_that_the_validation_lacks_is_named():
    with pytest.raises(SearchFailedError, match="the validation has no wer, only loss, wer: set search.minimize=loss"):
        Lab().search(searched("random", minimize="wer", failures=2))


def test_a_search_without_its_section_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tiny has no section search.*search\.space"):
        Lab().search(parse_config(tiny_document()))
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps(tiny_document()))
    assert "has no section search" in invoke("search", path, "--no-prefect", code=1).stderr


def test_of_two_searches_of_a_study_the_second_waits_or_is_refused(monkeypatch):
    monkeypatch.setattr("tasks.locking.slots.REFUSE_S", 0.05)
    refusing = searched("random", trials=1)
    refusing = refusing.model_copy(update={"slots": refusing.slots.model_copy(update={"collision": "refuse"})})

    def again(run):
        with pytest.raises(SlotTakenError, match="the study tiny: held by"):
            Lab().search(refusing)

    Lab(again).search(refusing)


def test_what_affects_no_result_may_change_between_two_runs_of_a_search_and_all_else_may_not():
    config = searched("random", trials=3)
    document = config.model_dump(mode="json", by_alias=True)

    def changed(section, **fields):
        return parse_config(document | {section: document[section] | fields})

    same = study_content(config)
    assert study_content(changed("train", threads=2)) == same
    assert study_content(changed("search", trials=9, hours=1.0, parallel=2)) == same
    assert study_content(changed("slots", trainings=0)) == same
    for other in (changed("train", max_batch=8), changed("search", seed=2), changed("search", minimize="wer")):
        assert study_content(other) != same
    Lab().search(config)
    with pytest.raises(StudyError, match="made with another configuration"):
        Lab().search(changed("train", max_batch=8))


def test_the_command_runs_a_search_and_shows_what_it_has_found(tmp_path, monkeypatch):
    lab = Lab()

    def plainly(config):
        return lab.search(config)

    monkeypatch.setattr(module, "search_plainly", plainly)
    path = tmp_path / "a.yaml"
    document = tiny_document()
    document["train"] |= {"epochs": 9}
    path.write_text(json.dumps(document | {"search": {"method": "asha", "space": LR, "trials": 6}}))
    assert "there is no study yet" in invoke("search", "status", code=1).stderr
    shown = invoke("search", path, "--no-prefect", "--set", "search.trials=9").stdout
    assert "tiny: asha, 9 of 9 trials" in shown
    assert invoke("search", "status").stdout == shown
    told = json.loads(invoke("search", "status", "tiny", "--json").stdout)
    assert told == json.loads(json.dumps(search_result(Studies().open("tiny"))))
    best = Studies().open("tiny").best
    lr = best.values["train.optimizer.lr"]
    assert invoke("search", "best").stdout.strip() == f"--set train.optimizer.lr={lr!r}"
    trials = json.loads(invoke("search", "show", "--json").stdout)["trials"]
    assert (trials[0]["number"], len(trials)) == (best.number, 9)
    assert "train.optimizer.lr" in invoke("search", "show", "tiny").stdout
    page = json.loads(invoke("search", "report", "--json").stdout)["report"]
    assert invoke("search", "report", "tiny").stdout == f"report: {page}\n"
    assert best.values.keys() <= set(re.findall(r"<td>([a-z.]+)</td>", Path(page).read_text()))
    assert "tiny ends after the trials" in invoke("search", "stop").stdout
    assert Studies().open("tiny").stopping
    assert "there is no study 'tini'; there are: tiny" in invoke("search", "show", "tini", code=1).stderr
    assert json.loads(invoke("search", "run", path, "--no-prefect", "--json").stdout)["planned"] == 6


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_flow_trains_each_part_of_a_trial_in_a_flow_run_of_its_own(monkeypatch, parallel):
    lab = Lab()
    monkeypatch.setattr(module, "ingest", lab.prepared.append)
    monkeypatch.setattr(module, "PrefectDisplay", lambda run: lab.display)
    monkeypatch.setattr(module, "train_flow", lambda config, run_id: lab.execute(open_run(config, run_id)))
    result = module.search.fn(searched("asha", trials=6, parallel=parallel), "s-1")
    assert result["complete"]
    assert [config.search for config in lab.prepared] == [None]
    assert sum(result["trials"].values()) == 6
    assert {run.run_id for run in lab.runs} == {f"s-1-trial-{number}" for number in range(6)}
    assert lab.display.shares[-1] == 1.0
    assert not any(run_id.startswith("s-1") for run_id in stage_tasks._runs)


def test_the_trials_mlflow_runs_are_children_of_the_searchs(monkeypatch, home):
    monkeypatch.undo()
    monkeypatch.setenv("STARLING_HOME", str(home))
    give_mlflow(home)
    lab = Lab()
    result = lab.search(searched("random", trials=2))
    api = client()
    parent = api.get_run(result["mlflow_run"])
    assert {run.trial.tags[search_tracking.PARENT_TAG] for run in lab.runs} == {parent.info.run_id}
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best_loss"] == min(result["best"]["losses"].values())
    attached = [file.path for file in api.list_artifacts(parent.info.run_id)]
    assert attached == ["history.png", "parallel.png", "report.html", "search.json"]
    assert [artifact.name for artifact in lab.display.artifacts] == [
        *("search", "search-trials", "search-history", "search-parallel")
    ]
    assert Lab().search(searched("random", trials=3))["mlflow_run"] == parent.info.run_id


def test_how_much_is_left_is_shown_while_the_search_runs(capsys):
    lab, said = Lab(), []
    with progress.following(lambda stage, text: said.append(text)):
        lab.search(searched("random", trials=4))
    assert lab.display.shares == [0.25, 0.5, 0.75, 1.0]
    assert all("; about 0:0" in note for note in lab.display.notes[:-1])
    assert "left" not in lab.display.notes[-1]
    assert "; 9 of 36 epochs; about 0:0" in said[0]
    assert said[-1].endswith("; 36 of 36 epochs")


def test_plots_that_cannot_be_drawn_end_no_search(monkeypatch, caplog, home):
    def broken(study, result):
        raise OSError("no space left on the disk")

    monkeypatch.undo()
    monkeypatch.setenv("STARLING_HOME", str(home))
    monkeypatch.setattr(module, "write_report", broken)
    monkeypatch.setattr(search_tracking, "client", lambda: None)
    assert Lab().search(searched("random", trials=1))["complete"]
    assert "the report of the search is not written: OSError: no space left" in caplog.text


@pytest.mark.slow
def test_a_search_with_real_trainings_continues_the_best_trials(home):
    config = searched(epochs=3, trials=3)
    result = module.search_plainly(config)
    assert result["complete"]
    assert result["trials"] == {"finished": 1, "paused": 2, "running": 0, "failed": 0}
    assert result["best"]["losses"].keys() >= {3}
