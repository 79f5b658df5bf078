"""The fault battery (`benchmarks.faults`): roles of processes, random faults, and what counts as a finding."""

import importlib.util
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import load_beside, wait_until

from benchmarks import faults, faults_trial
from benchmarks.faults_checks import (
    LEAST_SPREAD,
    SIGMAS,
    Band,
    epochs_whole,
    no_locks,
    rate_within,
    registered_once,
    weights_finite,
)
from benchmarks.faults_plan import BATTERY_STAGES, Progress, Sample, draw, pairs_of, progress_of
from benchmarks.faults_processes import COMMAND, EVERYTHING, GROUP, MODULES, OTHER, WORKER, Household, role_of
from benchmarks.faults_recipe import EPOCHS, NAME, TRAIN_UTTERANCES, VARIANTS, make_corpus
from benchmarks.faults_trial import Attempt, Given, Outcome, Trial, last_word
from storage.locks import file_lock
from tasks.config.pipeline import parse_config
from tasks.locking.lock_owner import LockOwner

TRAIN = BATTERY_STAGES.index("train")
"""Position of the training among the stages of the battery's pipelines."""

PYTHON = sys.executable


# --- roles of processes


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("python -m flows.cli.app run config.yaml --json", COMMAND),
        ("python -m uvicorn --factory flows.servers.prefect_server:create_app --port 1", "Prefect server"),
        ("python -m training.launch.supervisor job.json 7", "supervisor"),
        ("python -m tasks.engine training.launch.supervisor job.json 7", "supervisor"),
        ("python -m training.coordinator.server --folder store --fresh", "coordinator"),
        ("python -m torch.distributed.run --nnodes 1 -m tasks.engine training.node.rank node.json 7", "torchrun agent"),
        ("python -u -m tasks.engine training.node.rank node.json 7", "learner"),
        ("python -m training.exchange.daemon 3 4 7", "exchange daemon"),
        ("python -c from_multiprocessing.spawn_import_spawn_main --multiprocessing-fork", WORKER),
        ("git rev-parse HEAD", OTHER),
    ],
)
def test_role_of_a_process_follows_from_its_module(line, role):
    assert role_of(line.split()) == role


def test_forked_child_before_exec_has_no_role():
    words = ["python", "-m", "training.node.agent", "--coordinator", "x"]
    assert role_of(words, parent=words) == OTHER


@pytest.mark.parametrize("module", MODULES)
def test_the_modules_of_roles_exist(module):
    assert importlib.util.find_spec(module)


@pytest.fixture
def household(tmp_path):
    home = Household(tmp_path.resolve() / "home")
    yield home
    home.end()


def test_orphans_are_found_and_killed_even_if_stopped(household):
    child = "import os, time; os.setsid(); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    subprocess.run([PYTHON, "-c", parent], env=os.environ | {"STARLING_HOME": household.home}, check=True)
    (orphan,) = wait_until(household.living)
    orphan.process.send_signal(signal.SIGSTOP)
    assert [process.pid for process in household.wait_until_gone(0.0)] == [orphan.pid]
    household.end()
    assert household.wait_until_gone(240.0) == []


def test_processes_of_another_data_folder_are_not_touched(household):
    with subprocess.Popen(["sleep", "600"], env=os.environ | {"STARLING_HOME": household.home + "2"}) as other:
        assert household.living() == []
        household.end()
        assert other.poll() is None
        other.kill()


def test_ctrl_c_ends_a_command_of_a_battery_in_the_background(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for `command &`
    try:
        attempt = Attempt([PYTHON, "-c", "import time; print(1, flush=True); time.sleep(600)"], tmp_path, tmp_path, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(attempt.output.read_text)
    os.killpg(attempt.process.pid, signal.SIGINT)
    assert attempt.process.wait(240)
    assert "KeyboardInterrupt" in attempt.words()


# --- the plan


def samples():
    """A run: the command alone, then a learner, then the command alone."""
    train = TRAIN
    drawn = []
    for second in range(60):
        epochs = max(0, second - 20)
        progress = Progress(min(second // 5, train), epochs) if second < 50 else Progress(train + 1)
        roles = (COMMAND, GROUP, EVERYTHING, *(("learner",) if 20 <= second < 50 else ()))
        drawn.append(Sample(progress, 0.5, roles))
    return drawn


def test_a_seed_gives_the_same_plan_and_another_seed_another():
    plans = [draw(random.Random(seed), samples(), Counter(), 8) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_faults_are_ordered_by_progress_and_hit_running_roles():
    for seed in range(40):
        plan = draw(random.Random(seed), samples(), Counter(), 5)
        assert [fault.progress for fault in plan] == sorted(fault.progress for fault in plan)
        for fault in plan:
            assert any(fault.role in sample.roles for sample in samples() if sample.progress == fault.progress)
            assert (fault.stop_s > 0) == (fault.signal == "STOP")


def test_pairs_of_role_and_signal_are_drawn_equally_often():
    rng, drawn = random.Random(3), Counter()
    for _ in range(26):
        drawn.update(fault.pair for fault in draw(rng, samples(), drawn, 5))
    assert set(drawn) == set(pairs_of(samples()))
    assert set(drawn.values()) == {10}


def test_only_requested_pairs_are_drawn():
    only = [("learner", "TERM"), ("there is no such role", "KILL")]
    plan = draw(random.Random(1), samples(), Counter(), 3, only)
    assert [fault.pair for fault in plan] == [("learner", "TERM")] * 3
    assert draw(random.Random(1), samples(), Counter(), 3, only[1:]) == []


def test_progress_counts_published_stages_and_epochs(tmp_path):
    assert progress_of(tmp_path) == Progress(0)
    for stage in ("prepare", "shard", "features", "decode"):
        folder = tmp_path / "objects" / stage / "key"
        folder.mkdir(parents=True)
        (folder / "done.json").write_text("{}")
    work = tmp_path / "work" / "train-key"
    work.mkdir(parents=True)
    lines = [{"kind": "start"}, {"kind": "epoch", "epoch": 1}, {"kind": "valid", "epoch": 1}]
    (work / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert progress_of(tmp_path) == Progress(TRAIN, 1)
    assert Progress(3, 9) < Progress(4)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_variants_are_valid_configurations(tmp_path, variant):
    config = parse_config(variant.document(tmp_path / "metadata.csv", seed=1))
    assert config.train.nodes > 1
    assert config.train.epochs == EPOCHS


# --- verdicts


def journal(**changes):
    entries = [
        {"kind": "epoch", "epoch": n, "index": 5, "utterances": 5, "repeated": 1, "repeated_ids": ["a"]}
        for n in (1, 2, 3)
    ]
    entries[1] |= changes
    return [{"kind": "start"}, *entries, {"kind": "end"}]


def test_complete_epochs_give_no_finding():
    assert list(epochs_whole(journal(), 3, 5)) == []


@pytest.mark.parametrize(
    "changes",
    [{"utterances": 4}, {"unreadable": 1}, {"index": 6}, {"repeated_ids": []}, {"epoch": 3}, {"kind": "step"}],
    ids=str,
)
def test_incomplete_epoch_is_a_finding(changes):
    assert len(list(epochs_whole(journal(**changes), 3, 5))) == 1


def test_wrong_number_of_epochs_is_a_finding():
    assert len(list(epochs_whole(journal(), 4, 5))) == 1


def test_weights_that_are_not_finite_are_a_finding(tmp_path):
    bundles = load_beside(__file__, "recognition/test_bundle.py")
    spec, model = bundles.write(tmp_path / "model")
    assert list(weights_finite(tmp_path / "model")) == []
    name, tensor = next(iter(model.state_dict().items()))
    tensor.view(-1)[0] = torch.nan
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    bundles.save_bundle(tmp_path / "model", spec, weights)
    assert [name in finding.text for finding in weights_finite(tmp_path / "model")] == [True]
    (tmp_path / "model" / "bundle.json").unlink()
    assert len(list(weights_finite(tmp_path / "model"))) == 1


def test_the_band_of_error_rates_grows_with_the_spread():
    calm = Band.of({"a": [0.30, 0.30], "b": [0.31, 0.31]}, words=100_000)
    wild = Band.of({"a": [0.20, 0.40], "b": [0.31, 0.31]}, words=100_000)
    assert calm["a"].limit == pytest.approx(0.30 + SIGMAS * LEAST_SPREAD, abs=0.001)
    assert 0.30 < calm["a"].limit < wild["a"].limit
    assert wild["a"].highest == 0.40
    assert list(rate_within(0.31, calm["a"])) == []
    assert len(list(rate_within(0.9, calm["a"]))) == len(list(rate_within(float("nan"), calm["a"]))) == 1


def leases(home, *holders):
    database = home / "prefect" / "prefect.db"
    database.parent.mkdir()
    rows = [(f"lock-{number}", json.dumps(vars(holder))) for number, holder in enumerate(holders)]
    with closing(sqlite3.connect(database)) as made, made:
        made.execute("CREATE TABLE variable (name TEXT, value TEXT)")
        made.executemany("INSERT INTO variable VALUES (?, ?)", [*rows, ("something-else", "{}")])


def test_held_lock_is_a_finding(tmp_path):
    path = tmp_path / "locks" / "train.lock"
    with file_lock(path, 1.0):
        assert [finding.kind for finding in no_locks(tmp_path, set())] == ["locks"]
    assert list(no_locks(tmp_path, set())) == []


def test_only_a_killed_command_may_leave_a_lease(tmp_path):
    living = LockOwner.here("this run")
    dead = replace(living, started="1")
    leases(tmp_path, living, dead)
    assert len(list(no_locks(tmp_path, set()))) == 2
    assert len(list(no_locks(tmp_path, {dead.pid}))) == 1


def test_a_model_is_registered_once(tmp_path):
    assert len(list(registered_once(tmp_path))) == 1
    database = tmp_path / "mlflow" / "mlflow.db"
    database.parent.mkdir()
    with closing(sqlite3.connect(database)) as made, made:
        made.execute("CREATE TABLE model_versions (name TEXT, version INTEGER)")
        made.execute("CREATE TABLE registered_model_aliases (name TEXT, alias TEXT)")
        made.execute("INSERT INTO model_versions VALUES (?, 1)", (NAME,))
    assert len(list(registered_once(tmp_path))) == 1  # it is not a champion
    with closing(sqlite3.connect(database)) as made, made:
        made.execute("INSERT INTO registered_model_aliases VALUES (?, 'champion')", (NAME,))
    assert list(registered_once(tmp_path)) == []
    with closing(sqlite3.connect(database)) as made, made:
        made.execute("INSERT INTO model_versions VALUES (?, 2)", (NAME,))
    assert len(list(registered_once(tmp_path))) == 1


# --- a run


def test_hanging_command_is_retried_and_failing_command_is_not(tmp_path, monkeypatch):
    commands = [["sleep", "600"], [PYTHON, "-c", "raise SystemExit('no luck')"]]

    def next_command(variant, config):
        trial.limit_s = 1.0 if len(commands) == 2 else 300.0
        return commands.pop(0)

    monkeypatch.setattr(faults_trial, "run_command", next_command)
    trial = Trial(VARIANTS["plain"], 1, tmp_path / "run", tmp_path, (), 1, limit_s=1.0, say=lambda text: None)
    outcome = trial.run(None)
    assert [finding.kind for finding in outcome.findings] == ["does not end", "fails by itself", "not finished"]
    assert "no luck" in outcome.findings[1].text
    assert (outcome.attempts, outcome.finished) == (2, False)
    assert trial.household.living() == []


# --- the report


def test_last_word_is_the_error_message():
    text = "starting\nTraceback\n  File x\nValueError: a field\n  1. remedy\nat last\n"
    assert last_word(text) == "ValueError: a field"
    assert last_word("error A: see the log:\nfirst\nthe cause\n") == "error A: see the log: the cause"
    assert last_word("starting\n\ndone\n") == "done"
    assert last_word("") == ""


def test_table_counts_faults_exits_and_findings():
    plan = draw(random.Random(1), samples(), Counter(), 2, [("learner", "KILL")])
    ended, survived = (Given(fault, 1, 7, 3.0, "train 2", finished_s=40.0) for fault in plan)
    ended.status, ended.end_s, ended.said = 1, 2.0, "no | luck"
    rows = faults.rows_of([Outcome("plain", 1, "f", given=[ended, survived])])
    assert [(row["role"], row["faults"], row["ended"], row["finished"], row["findings"]) for row in rows] == [
        ("learner", 2, 1, 2, 0)
    ]
    assert "| learner | KILL | 2 | 1 | 2 | 2 | 40 | 0 | 1: no / luck |" in faults.table_of(rows)


def test_pair_option_needs_a_role_and_a_signal():
    assert faults._pair("Prefect server:TERM") == ("Prefect server", "TERM")
    for text in ("learner", ":KILL", "learner:HUP"):
        with pytest.raises(Exception, match="ROLE:SIGNAL"):
            faults._pair(text)


def test_corpus_is_synthesized_only_once(tmp_path):
    table = make_corpus(tmp_path / "corpus")
    rows = table.read_text().splitlines()
    assert sum(row.startswith("train-") for row in rows) == TRAIN_UTTERANCES
    before = {path: path.stat().st_mtime_ns for path in Path(tmp_path).rglob("*.flac")}
    assert make_corpus(tmp_path / "corpus") == table
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_three_faults_leave_no_finding(tmp_path):
    """A learner and its exchange are lost and the whole run is killed: the command finishes the work."""
    only = ["learner:KILL", "exchange daemon:STOP", "everything:KILL"]
    words = ["--faults", "3", "--per-run", "3", "--variants", "plain", "--calm-runs", "1", "--epochs", "3"]
    assert faults.main([*words, "--folder", str(tmp_path), "--only", *only]) == 0
    outcomes = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert all(outcome["finished"] for outcome in outcomes)
    given = [fault for outcome in outcomes for fault in outcome["given"]]
    assert len(given) == 3
    assert all(fault["status"] for fault in given if fault["fault"]["role"] == "everything")
    assert not list(tmp_path.glob("run-*")), "folders of runs without findings are removed"
