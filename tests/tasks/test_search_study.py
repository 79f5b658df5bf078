"""Studies and the driver: no trial is done twice or lost, whatever is killed; failures are kept with their errors."""

import json
import math
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import ROOT, wait_until

from tasks.search.config import SearchConfig
from tasks.search.driver import SearchDriver, SearchFailedError, TrialTimeoutError, Watch, spent_budget
from tasks.search.methods.base import TrialJob
from tasks.search.study import Studies, StudyError, TrialOutcome, _place

SPACE = {"lr": {"low": 1e-4, "high": 0.1, "log": True, "points": 5}}
LARGEST = 9


@pytest.fixture
def studies(tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    return Studies()


def config(method="hyperband", **fields):
    return SearchConfig.model_validate({"method": method, "space": SPACE, **fields})


def loss(job):
    return (math.log10(job.values["lr"]) + 2) ** 2 + 1 / job.budget


def train(job, watch):
    return TrialOutcome(loss(job), {"wer": 0.5})


def driver(studies, search, train=train, name="s", **more):
    study = studies.create(name, {"space": SPACE})
    return SearchDriver(study, search.build(LARGEST), search, LARGEST, train, **more)


def kept(study):
    """Everything of a study that does not depend on time."""
    study.read()
    return [(t.number, t.values, t.state, t.budget, t.trained, dict(t.losses), t.error) for t in study.trials]


def test_a_search_keeps_every_trial_and_result(studies):
    search = config()
    run = driver(studies, search)
    run.run()
    assert {trial.state for trial in run.study.trials} == {"paused", "finished"}
    again = studies.open("s")
    assert kept(again) == kept(run.study)
    assert [t.figures for t in again.trials] == [{budget: {"wer": 0.5} for budget in t.losses} for t in again.trials]
    best = again.best
    assert best.trained == 9
    assert best.losses[9] == min(trial.losses[9] for trial in again.trials if 9 in trial.losses)
    # brackets of 9, 3 and 3 trials: (9, 1) (3, 3) (1, 9); (3, 3) (1, 9); (3, 9)
    assert spent_budget(again.trials, restarts=False) == 9 + 3 * 2 + 6 + 3 * 3 + 6 + 3 * 9
    assert spent_budget(again.trials, restarts=True) == 9 + 3 * 3 + 9 + 3 * 3 + 9 + 3 * 9


@pytest.mark.parametrize("method", ["grid", "random", "hyperband", "asha", "bohb"])
def test_a_search_in_parallel_does_the_same_number_of_trials(studies, method):
    search = config(method, parallel=4)

    def some_time(job, watch):
        time.sleep(0.001 * (job.number % 3))
        return train(job, watch)

    run = driver(studies, search, some_time)
    run.run()
    assert len(run.study.trials) == run.method.total
    assert not run.study.interrupted


def test_a_failed_trial_is_kept_with_its_error_and_does_not_stop_the_search(studies):
    def some_fail(job, watch):
        if job.number % 4 == 1:
            raise RuntimeError("out of memory")
        return TrialOutcome(math.nan if job.number % 4 == 3 else loss(job))

    run = driver(studies, config("random"), some_fail)
    run.run()
    assert len(run.study.trials) == 20
    assert {t.error for t in run.study.trials if t.number % 4 == 1} == {"out of memory"}
    assert {t.error for t in run.study.trials if t.number % 4 == 3} == {"the validation's loss is nan"}
    assert all(t.state == ("failed" if t.number % 2 else "finished") for t in studies.open("s").trials)


def test_a_search_ends_after_several_failures_in_a_row_and_the_same_command_goes_on(studies):
    def fail(job, watch):
        raise ValueError("no such corpus")

    with pytest.raises(SearchFailedError, match=r"3 trials in a row failed, the last one \(trial 2\) with: no such"):
        driver(studies, config("random", failures=3), fail).run()
    run = driver(studies, config("random", failures=3))
    run.run()
    assert [trial.state for trial in run.study.trials] == ["failed"] * 3 + ["finished"] * 17


@pytest.mark.parametrize("parallel", [1, 3])
def test_what_is_not_a_trials_fault_ends_the_search_and_costs_no_trial(studies, parallel):
    def full(job, watch):
        if job.number == 4:
            raise OSError("no space left on the disk")
        return train(job, watch)

    search = config("random", parallel=parallel)
    with pytest.raises(OSError, match="no space left"):
        driver(studies, search, full, ends=lambda error: isinstance(error, OSError)).run()
    assert 4 in [job.number for job in studies.open("s").interrupted]
    run = driver(studies, search)
    run.run()
    assert [trial.state for trial in run.study.trials] == ["finished"] * 20


def test_an_error_ends_the_other_trainings_and_the_next_search_continues_them(studies):
    begun = threading.Event()

    def trained(job, watch):
        if job.number == 0:
            begun.wait(240)
            raise OSError("no space left on the disk")
        begun.set()
        while True:
            watch()
            time.sleep(0.01)

    with pytest.raises(OSError, match="no space"):
        driver(studies, config("random", parallel=2), trained, ends=lambda error: isinstance(error, OSError)).run()
    assert [job.number for job in studies.open("s").interrupted] == [0, 1]


def test_a_hung_trial_is_stopped_by_its_limit_and_fails(studies):
    def hang(job, watch):
        if job.number:
            return train(job, watch)
        while True:
            watch()
            time.sleep(0.001)

    run = driver(studies, config("random", trials=2, trial_hours=0.01 / 3600), hang)
    run.run()
    assert [trial.state for trial in run.study.trials] == ["failed", "finished"]
    assert "more than search.trial_hours" in run.study.trials[0].error
    assert issubclass(TrialTimeoutError, RuntimeError)


def test_waiting_for_a_slot_counts_little_against_a_trials_limit(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("tasks.search.driver.time.monotonic", lambda: clock[0])
    watch = Watch(100.0, threading.Event())
    for seconds in (0, 1, 7200, *[1] * 80):
        clock[0] += seconds
        watch()
    clock[0] += 10
    with pytest.raises(TrialTimeoutError, match="more than search.trial_hours"):
        watch()


def test_a_search_ends_at_its_limit_of_epochs_and_goes_on_with_a_higher_one(studies):
    run = driver(studies, config(total_budget=12))
    run.run()
    assert run.spent == 13  # nine of one epoch, and two that went on by two
    driver(studies, config(total_budget=20)).run()
    whole = driver(studies, config())
    whole.run()
    alone = driver(studies, config(), name="alone")
    alone.run()
    assert kept(whole.study) == kept(alone.study)


def test_a_search_ends_at_its_limit_of_time_counted_over_all_of_its_runs(studies):
    run = driver(studies, config("random", hours=1e-12))
    run.run()
    assert len(run.study.trials) == 0
    study = studies.open("s")
    study.note_seconds(7200.0)
    driver(studies, config("random", hours=1.9)).run()
    assert studies.open("s").trials == []
    driver(studies, config("random", hours=2.1)).run()
    assert len(studies.open("s").trials) == 20


def test_a_search_that_is_asked_to_stop_begins_nothing_more_until_it_is_started_again(studies):
    def stop(job, watch):
        if job.number == 3:
            Studies().open("s").ask_to_stop()
        return train(job, watch)

    driver(studies, config("random"), stop).run()
    assert len(studies.open("s").trials) == 4
    driver(studies, config("random")).run()
    assert len(studies.open("s").trials) == 20


def test_of_two_processes_only_one_begins_a_trial(studies):
    first, second = studies.create("s", {}), studies.create("s", {})
    first.begin(TrialJob(0, {"lr": 0.1}, 1))
    with pytest.raises(StudyError, match="trial 0 of the study s was changed by another process"):
        second.begin(TrialJob(0, {"lr": 0.2}, 1))
    second.read()
    first.report(TrialJob(0, {"lr": 0.1}, 1), TrialOutcome(1.0), "paused")
    with pytest.raises(StudyError, match="by another process"):
        second.fail(TrialJob(0, {"lr": 0.1}, 1), "late")
    assert [trial.state for trial in studies.open("s").trials] == ["paused"]
    second.read()
    first.begin(TrialJob(0, {"lr": 0.1}, 3))
    with pytest.raises(StudyError, match="by another process"):
        second.begin(TrialJob(0, {"lr": 0.1}, 3))


def test_a_study_of_another_search_is_refused_with_what_differs(studies):
    studies.create("s", {"space": {"lr": [1]}, "method": "random"})
    studies.create("s", {"method": "random", "space": {"lr": (1,)}})
    with pytest.raises(StudyError, match=r"another space, so its results .*search\.study"):
        studies.create("s", {"space": {"lr": [2]}, "method": "random"})


def test_an_unknown_study_is_refused_with_those_that_there_are(studies):
    with pytest.raises(StudyError, match=r"there is no study 'a'; there is none yet: `starling search CONFIG`"):
        studies.open("a")
    studies.create("b", {})
    with pytest.raises(StudyError, match="there are: b"):
        studies.open("a")


def test_many_processes_make_the_same_database_and_study(tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        assert {s.name for s in pool.map(lambda _: Studies().create("s", {"a": 1}), range(16))} == {"s"}
    assert Studies().names() == ["s"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "in memory, which a kill deletes"),
        ("sqlite:////no/such/folder/s.db", "cannot be used: unable to open database file; check search.url"),
        ("nonsense", "no database of studies"),
        ("nosuch://host/db", "no database of studies"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_with_the_remedy(tmp_path, monkeypatch, url, message):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    with pytest.raises(StudyError, match=message):
        Studies(url)


def test_a_damaged_database_is_named_and_no_password_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    (tmp_path / "s.db").write_bytes(b"not a database, and long enough to be read as one" * 50)
    with pytest.raises(StudyError, match=r"s\.db cannot be used: file is not a database"):
        Studies(f"sqlite:///{tmp_path / 's.db'}")
    with pytest.raises(StudyError) as caught:
        Studies("postgresql+nodriver://me:secret@127.0.0.1:1/db")
    assert "secret" not in str(caught.value)


def test_the_password_of_the_environment_is_for_the_database_of_the_environment_only(monkeypatch):
    ours = "postgresql+psycopg2://studies@127.0.0.1:5433/studies"
    monkeypatch.setenv("STARLING_STUDIES_PASSWORD", "secret")
    assert _place(ours).password is None
    monkeypatch.setenv("STARLING_STUDIES", ours)
    assert _place(ours).password == "secret"
    assert _place("postgresql+psycopg2://studies@db.example.com/studies").password is None
    monkeypatch.setenv("STARLING_STUDIES", "postgresql+psycopg2://studies:own@127.0.0.1/studies")
    assert _place("postgresql+psycopg2://studies:own@127.0.0.1/studies").password == "own"


KILLED = """
import sys, time, json, math
sys.path.insert(0, {root!r})
from tasks.search.config import SearchConfig
from tasks.search.driver import SearchDriver
from tasks.search.study import TrialOutcome, Studies
search = SearchConfig.model_validate(json.loads(sys.argv[1]))
def train(job, watch):
    with open(sys.argv[2], "a") as file:
        file.write(json.dumps([job.number, job.budget]) + "\\n")
    time.sleep(0.004)
    return TrialOutcome((math.log10(job.values["lr"]) + 2) ** 2 + 1 / job.budget, {{"wer": 0.5}})
SearchDriver(Studies().create("s", {{"space": 1}}), search.build(9), search, 9, train).run()
"""


@pytest.mark.real_interpreter
def test_a_search_that_is_killed_at_any_moment_ends_with_the_same_trials_as_one_that_is_not(tmp_path, monkeypatch):
    search = {"method": "bohb", "space": SPACE, "trials": 30}  # whose proposals depend on all results
    program = KILLED.format(root=str(ROOT))
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "killed"))
    log = tmp_path / "log.jsonl"

    def begun():
        return log.read_text().splitlines() if log.exists() else []

    for kill_at in (4, 17):
        process = subprocess.Popen([sys.executable, "-c", program, json.dumps(search), str(log)], cwd=ROOT)
        wait_until(lambda: len(begun()) >= kill_at or process.poll() is not None, every_s=0.001)  # noqa: B023
        process.kill()
        process.wait()
        assert len(begun()) >= kill_at
    subprocess.run([sys.executable, "-c", program, json.dumps(search), str(log)], cwd=ROOT, check=True, timeout=240)
    jobs = [tuple(json.loads(line)) for line in begun()]
    assert len(jobs) - len(set(jobs)) <= 2  # only what trained when it was killed begins again
    killed = kept(Studies().open("s"))
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "alone"))
    alone = driver(Studies(), SearchConfig.model_validate(search))
    alone.run()
    assert killed == kept(alone.study)


def test_ten_thousand_trials_take_a_few_megabytes(studies, tmp_path):
    study = studies.create("s", {})
    rows = [("s", number, '{"train.optimizer.lr": 0.00123}', "finished", 9, 9, "", 1.0) for number in range(10_000)]
    results = [("s", number, 9, 0.5, "{}", 1.0) for number in range(10_000)]
    with sqlite3.connect(tmp_path / "search" / "studies.db") as base:
        base.executemany("INSERT INTO starling_trials VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        base.executemany("INSERT INTO starling_results VALUES (?, ?, ?, ?, ?, ?)", results)
    study.read()
    assert len(study.trials) == 10_000
    assert (tmp_path / "search" / "studies.db").stat().st_size < 5e6
