"""The flow `search` and the command `starling search`, with trainings that only compute a loss."""

import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import invoke
from support import give_mlflow, tiny_document

from flows import search as module
from flows.search import SearchDisplay, run_search, study_content
from speech.decoding import DecodeError
from speech.scoring import ErrorCounts
from storage.retries import DiskError
from tasks.config.pipeline import parse_config
from tasks.locking.slots import SlotTakenError
from tasks.orchestration import stage_tasks
from tasks.orchestration.stage_tasks import open_run
from tasks.search.driver import SearchFailedError
from tasks.search.study import Studies, StudyError
from tasks.stages import progress
from tasks.stages.base import StageError, StageResult
from tasks.stages.paused import paused_output
from tasks.tracking import search_tracking
from tasks.tracking.runs import client
from tasks.tracking.search_report import search_result

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
    return parse_config(document | {"search": {"method": method, "space": LR} | fields})


@pytest.fixture
def summarized(monkeypatch):
    """Stands for what a run of all stages has come to."""
    summary = {"sets": {"test": {"wer": 0.25}}, "model_uri": "models:/tiny/3", "decision": "became champion"}
    monkeypatch.setattr(module, "summarize", lambda run: summary | {"report": None, "run_id": run.run_id})


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
        self.evaluated, self.display = [], Shown()

    def execute(self, run, until):
        if run.trial is None:
            assert until == "report"
            self.evaluated.append(run)
            self.spoil(run)
            return run
        self.runs.append(run)
        run.trial.watch()
        self.spoil(run)
        train = run.config.train
        luck = 0.01 * (run.config.training_seed - 1)
        valid = {"loss": (math.log10(train.optimizer.lr) + 2) ** 2 + 1 / train.epochs + luck, "wer": None}
        key = f"{abs(hash((train.optimizer.lr, train.epochs, run.config.training_seed))):016x}"[:16]
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
    assert result["spent"] == sum(run.config.train.epochs - run.trial.before.get("epochs", 0) for run in lab.runs)
    parts = [(run.run_id, run.config.train.epochs) for run in lab.runs]
    assert len(parts) == len(set(parts))
    assert {run.trial.before.get("epochs", 0) for run in lab.runs if run.config.train.epochs == 9} == {0, 3}
    assert all(run.trial.keep == (run.config.train.epochs < 9) for run in lab.runs)
    best = result["best"]
    assert best["losses"][9] == min(t.losses[9] for t in Studies().open("tiny").trials if 9 in t.losses)
    again = Lab()
    assert again.search(config)["best"] == best
    assert again.runs == []
    assert json.loads(json.dumps(result))["best"]["number"] == best["number"]


def test_trials_continue_by_utterances_and_what_is_shown_counts_these(tmp_path):
    lab = Lab()
    method = {"kind": "hyperband", "min_budget": 10}
    config = searched(method, budget="utterances", max_budget=90, seeds=2, evaluate_best=False)
    result = lab.search(config)
    trials = [run for run in lab.runs if "seed" not in run.run_id]
    limits = {(run.config.train.max_utterances, *run.trial.before.items()) for run in trials}
    assert limits == {(10,), (30,), (90,), (30, ("max_utterances", 10)), (90, ("max_utterances", 30))}
    assert {run.config.train.epochs for run in lab.runs} == {9}
    assert all(run.trial.keep == (run.config.train.max_utterances < 90) for run in lab.runs)
    assert {run.config.train.max_utterances for run in lab.runs[len(trials) :]} == {90}
    assert (result["unit"], result["spent"], result["seeds"]["budget"]) == ("utterances", 630, 90)
    status = invoke("search", "status").stdout
    assert "\nutterances trained: 630 of 630, in " in status
    assert "after 90 utterances\n" in status
    assert "2 of 2 trained, 90 utterances each" in status
    assert " utterances " in invoke("search", "show").stdout.splitlines()[2]
    assert Lab().search(config)["best"] == result["best"]
    with pytest.raises(StudyError, match="made with another max_budget"):
        Lab().search(searched(method, budget="utterances", max_budget=270))


def test_trials_of_restarted_rungs_neither_continue_nor_keep_anything():
    lab = Lab()
    lab.search(searched({"kind": "hyperband", "rungs": "restart"}))
    assert {(run.trial.before.get("epochs", 0), run.trial.keep) for run in lab.runs} == {(0, False)}


def test_checkpoints_are_kept_while_a_trial_may_go_on_and_left_to_garbage_collection_at_the_end():
    config = searched(total_budget=10)
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
    config = searched(total_budget=9)
    Lab().search(config)
    store = module.Run(config, "r").store

    def paused(trial):
        return paused_output(store, trial.figures[1]["training"])

    size = sum(entry.size for entry in paused(Studies().open("tiny").trials[0]).store.entries())
    Lab().search(searched(total_budget=9, keep_gb=3.5 * size / 1e9, study="other"))
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
def test_the_flow_trains_each_part_of_a_trial_in_a_flow_run_of_its_own(monkeypatch, summarized, parallel):
    lab = Lab()
    monkeypatch.setattr(module, "ingest", lab.prepared.append)
    monkeypatch.setattr(module, "PrefectDisplay", lambda run: lab.display)
    monkeypatch.setattr(module, "train_flow", lambda config, run_id: lab.execute(open_run(config, run_id), "train"))
    monkeypatch.setattr(module, "pipeline", lambda config, run_id, until: lab.execute(open_run(config, run_id), until))
    result = module.search.fn(searched("asha", trials=6, parallel=parallel, seeds=2), "s-1")
    assert result["complete"]
    assert [config.search for config in lab.prepared] == [None]
    assert sum(result["trials"].values()) == 6
    again = {f"s-1-trial-{result['best']['number']}-seed-{seed}" for seed in (2, 3)}
    assert {run.run_id for run in lab.runs} == {f"s-1-trial-{number}" for number in range(6)} | again
    assert lab.display.shares[-3:] == [1.0, 0.5, 1.0]  # the seeds are shown after the trials
    assert [(run.run_id, run.config.search) for run in lab.evaluated] == [("s-1-best", None)]
    assert not any(run_id.startswith("s-1") for run_id in stage_tasks._runs)


class Decoder:
    """Stands for the encoded validation set: the best beam is 4, and one value of it cannot be decoded with."""

    def __init__(self):
        self.values, self.closed = [], False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def errors(self, values, watch):
        watch()
        self.values.append(values)
        if values["beam"] == 3:
            raise DecodeError("no path")
        return ErrorCounts(cor=10, sub=abs(values["beam"] - 4))


def decoding(monkeypatch, **search):
    decoder, made = Decoder(), []
    monkeypatch.setattr(module, "own_bundle", lambda run, folder: folder)
    monkeypatch.setattr(module, "validation_trials", lambda run, *more: made.append((run, *more[1:])) or decoder)
    search = {"method": "grid", "minimize": "wer", "space": {"decode.beam": [2, 3, 4, 5]}} | search
    config = parse_config(tiny_document(decode="beam", lm={}, tune={"space": {"beam": [2]}}, search=search))
    return decoder, made, config


def test_the_flow_trains_once_to_search_decoding_and_a_trial_that_fails_ends_nothing(monkeypatch):
    decoder, made, config = decoding(monkeypatch, utterances=7)
    flows = []
    monkeypatch.setattr(module, "ingest", lambda shared: flows.append(("ingest", shared.search)))
    monkeypatch.setattr(module, "pipeline", lambda config, run_id, until: flows.append((run_id, until)))
    display = Shown()
    monkeypatch.setattr(module, "PrefectDisplay", lambda run: display)
    result = module.search.fn(config, "s-1")
    assert flows == [("ingest", None), ("s-1-model", "graph")]
    assert [(run.config.search, run.config.tune, *more) for run, *more in made] == [(None, None, 7, 4)]
    assert decoder.values == [{"beam": beam} for beam in (2, 3, 4, 5)]
    assert decoder.closed
    assert result["complete"]
    assert result["trials"] == {"finished": 3, "paused": 0, "running": 0, "failed": 1}
    assert (result["best"]["values"], result["best"]["losses"]) == ({"decode.beam": 4}, {0: 0.0})
    assert Studies().open("tiny").trials[1].error == "no path"
    assert display.shares == [0.25, 0.5, 0.75, 1.0]
    assert display.notes[-1] == "trial 2 is the best so far: 0.0000"
    assert not stage_tasks._runs
    status = invoke("search", "status").stdout
    assert "epoch" not in status + invoke("search", "show").stdout
    assert "\nsearched for 0:0" in status
    assert status.endswith("best: trial 2, wer 0.0000\n  decode.beam=4\n")
    assert invoke("search", "best").stdout == "--set decode.beam=4\n"


def test_a_search_over_decoding_that_cannot_train_its_model_fails_no_trial(monkeypatch):
    _, _, config = decoding(monkeypatch)

    def execute(run, until):
        raise StageError("no GPU")

    with pytest.raises(StageError, match="no GPU"):
        run_search(config, "s-1", "", lambda shared: None, execute, SearchDisplay())
    assert Studies().open("tiny").trials == []


def test_training_the_model_does_not_count_for_the_hours_of_a_search_over_decoding(monkeypatch):
    decoder, _, config = decoding(monkeypatch, hours=1.0)
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr("tasks.search.driver.time", clock)

    def execute(run, until):
        ahead[0] += 7200.0
        return run

    result = run_search(config, "s-1", "", lambda shared: None, execute, SearchDisplay())
    assert len(decoder.values) == 4
    assert result["seconds"] < 3600


def test_results_of_a_search_over_decoding_depend_on_the_decoder_and_the_utterances(monkeypatch):
    _, _, config = decoding(monkeypatch)
    same, document = study_content(config), config.model_dump(mode="json", by_alias=True)
    assert study_content(parse_config(document | {"tune": None, "score": {"sets": ["test"]}})) == same
    others = ("decode", {"beam_tokens": 7}), ("search", {"utterances": 9}), ("lm", {"order": 2})
    for section, fields in others:
        assert study_content(parse_config(document | {section: document[section] | fields})) != same


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
    assert Lab().search(searched("random", trials=3, seeds=2, evaluate_best=False))["mlflow_run"] == parent.info.run_id
    metrics = api.get_run(result["mlflow_run"]).data.metrics
    assert metrics["seeds_loss_mean"] == pytest.approx(metrics["best_loss"] + 0.015)
    assert metrics["seeds_loss_std"] == pytest.approx(0.01 / 2**0.5)


def test_the_best_configuration_is_trained_with_other_seeds_and_the_best_of_these_evaluated(summarized):
    config, lab = searched("random", trials=4, seeds=3), Lab()
    result = lab.search(config)
    best, seeds = result["best"], result["seeds"]
    again = lab.runs[4:]
    assert [run.config.train.seed for run in again] == [2, 3, 4]  # not the search's, by which the best was chosen
    assert {run.config.seed for run in again} == {config.seed}  # which divides the data
    assert {run.config.train.optimizer.lr for run in again} == {best["values"]["train.optimizer.lr"]}
    assert {(run.config.train.epochs, *run.trial.before, run.trial.keep) for run in again} == {(9, False)}
    loss = best["losses"][9]
    assert seeds["losses"] == pytest.approx({2: loss + 0.01, 3: loss + 0.02, 4: loss + 0.03})
    assert seeds["trial"] == best["number"]
    assert (seeds["mean"], seeds["std"]) == pytest.approx((loss + 0.02, 0.01))
    assert seeds["spread"] == pytest.approx(0.01 * 2**0.5)
    [evaluated] = lab.evaluated
    assert evaluated.config == again[0].config  # the same address as its training
    assert seeds["best_seed"] == 2
    assert seeds["evaluation"]["model_uri"] == "models:/tiny/3"
    assert result["spent"] == 4 * 9
    repeated = Lab()
    assert repeated.search(config)["seeds"] == seeds
    assert repeated.runs == repeated.evaluated == []
    assert Studies().names() == ["tiny"]


def test_a_search_whose_seeds_were_interrupted_trains_only_the_others_and_evaluates_once(summarized):
    def spoil(run):
        if run.config.train.seed == 3 or run.trial is None:
            raise DiskError("the disk is full")

    config = searched("random", trials=4, seeds=3)
    with pytest.raises(DiskError):
        Lab(spoil).search(config)
    lab = Lab(lambda run: spoil(run) if run.trial is None else None)
    with pytest.raises(DiskError):
        lab.search(config)
    assert [run.config.train.seed for run in lab.runs] == [3, 4]
    lab = Lab()
    assert lab.search(config)["seeds"]["evaluation"]
    assert (lab.runs, len(lab.evaluated)) == ([], 1)


def test_trials_that_differ_by_less_than_the_spread_of_seeds_are_called_equal(summarized, tmp_path, monkeypatch):
    space = {"train.optimizer.lr": [0.01, 0.0128, 0.0137, 0.1]}  # 0.0115 and 0.0187 above the best, and 1
    lab = Lab()
    result = lab.search(searched("grid", space=space, seeds=3))
    near, *far = [trial.number for trial in sorted(Studies().open("tiny").trials, key=lambda t: t.losses[9])][1:]
    assert result["seeds"]["equal"] == [near]
    shown = invoke("search", "show").stdout
    assert [f" {number} = " in shown for number in (near, *far)] == [True, False, False]
    assert "differs from the best trial by less than trainings with other seeds do, 0.0141" in shown
    listed = json.loads(invoke("search", "show", "--json").stdout)["trials"]
    assert {trial["number"] for trial in listed if trial["equal"]} == {near}
    status = invoke("search", "status").stdout
    assert "other seeds: 3 of 3 trained, 9 epochs each: loss 0.1311 ± 0.0100" in status
    assert f"within the spread of seeds, 0.0141: trial {near}\n" in status
    assert "evaluated: models:/tiny/3, WER test 25.00 %; became champion" in status
    best = invoke("search", "best")
    assert best.stdout.strip() == "--set train.optimizer.lr=0.01"
    assert "with other seeds: 0.1311 ± 0.0100, lowest with seed 2" in best.stderr
    assert json.loads(invoke("search", "best", "--json").stdout)["seeds"]["mean"] == pytest.approx(0.13111, abs=1e-4)


def test_seeds_are_trained_after_a_limit_but_not_after_a_stop_and_may_come_later(summarized):
    def stop(run):
        if run.run_id.endswith("-1"):
            Studies().open("tiny").ask_to_stop()

    lab = Lab(stop)
    assert lab.search(searched("random", trials=4, seeds=2))["seeds"] is None
    lab = Lab()
    result = lab.search(searched("random", trials=4, seeds=2, total_budget=1, evaluate_best=False))
    assert len(lab.runs) == 2
    assert not result["complete"]
    assert result["seeds"]["evaluation"] is None
    assert "none (search.seeds)" in invoke("search", "status", f"tiny/seeds-of-{result['best']['number']}").stdout
    lab = Lab()
    assert lab.search(searched("random", trials=4))["complete"]
    assert lab.evaluated == []


def test_a_stop_ends_the_trainings_with_other_seeds_and_the_same_command_goes_on(summarized):
    def stop(run):
        if run.trial and run.config.train.seed == 2:
            Studies().open("tiny").ask_to_stop()

    lab, config = Lab(stop), searched("random", trials=2, seeds=3)
    result = lab.search(config)
    assert (result["complete"], len(result["seeds"]["losses"]), lab.evaluated) == (False, 1, [])
    lab = Lab()
    assert lab.search(config)["complete"]
    assert [run.config.train.seed for run in lab.runs] == [3, 4]


def test_a_seed_that_fails_is_kept_with_its_error_and_without_any_result_the_search_says_so(summarized):
    def spoil(run):
        if run.trial and run.config.train.seed in failing:
            raise ValueError("it diverged")

    failing = {3}
    seeds = Lab(spoil).search(searched("random", trials=2, seeds=3))["seeds"]
    assert (sorted(seeds["losses"]), seeds["errors"]) == ([2, 4], {3: "it diverged"})
    failing = {2, 3}
    with pytest.raises(SearchFailedError, match=r"all 2 trainings of trial . with other seeds failed.*it diverged"):
        Lab(spoil).search(searched("random", trials=2, seeds=2, study="other"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_best_of_real_trainings_with_other_seeds_is_registered(home, monkeypatch):
    give_mlflow(home)
    config = searched("random", epochs=1, trials=1, seeds=2)
    seeds = module.search_plainly(config)["seeds"]
    assert len(set(seeds["losses"].values())) == 2
    assert seeds["evaluation"]["model_uri"] == "models:/tiny/1"
    assert seeds["evaluation"]["sets"]["test"]["words"] > 0
    store = module.Run(config, "r").store
    assert sum(name.endswith("done.json") for name in store.list("train")) == 3  # evaluating trained nothing again
    assert sum(name.endswith("done.json") for name in store.list("prepare")) == 1  # one set of speakers for all


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
    def broken(study):
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
    # three trials are the first bracket: (3, 1) (1, 3)
    assert result["trials"] == {"finished": 1, "paused": 2, "running": 0, "failed": 0}
    assert result["best"]["losses"].keys() == {1, 3}
    first = min(Studies().open("tiny").trials, key=lambda trial: trial.losses[1])
    assert result["best"]["number"] == first.number
