"""Stages one after another, as Prefect tasks and without Prefect, with stages that only take note of their calls."""

import logging
from types import SimpleNamespace

import pytest
from support import tiny_document

from tasks import STAGES
from tasks.config.pipeline import parse_config
from tasks.orchestration import stage_tasks
from tasks.orchestration.stage_tasks import close_run, lines_logged, open_run, run_plainly
from tasks.stages import progress
from tasks.stages.base import StageError


@pytest.fixture
def config():
    return parse_config(tiny_document())


@pytest.fixture
def done(monkeypatch):
    """What was called, in order."""
    calls = []
    stages = {name: SimpleNamespace(execute=lambda run, name=name: calls.append(name)) for name in STAGES}
    monkeypatch.setattr(stage_tasks, "get_stage", stages.__getitem__)
    monkeypatch.setattr(stage_tasks, "check_names", lambda run: calls.append("check names"))
    monkeypatch.setattr(stage_tasks, "_tell_sets", lambda run, logger=None: calls.append("tell sets"))
    monkeypatch.setattr(stage_tasks, "publish", lambda run, result: calls.append(f"publish {result.url}"))
    monkeypatch.setattr(stage_tasks, "get_run_logger", lambda: logging.getLogger("tests.stages"))
    bar = SimpleNamespace(finish=lambda: calls.append("finish"))
    monkeypatch.setattr(stage_tasks, "ProgressArtifact", lambda run, name: calls.append(f"bar {name}") or bar)
    monkeypatch.setattr(stage_tasks.progress, "listening", lambda bar: lines_logged(logging.getLogger("tests.bar")))
    return calls


def test_plain_run_checks_names_once_sets_are_known_and_ends_with_the_last_stage(config, done):
    run = SimpleNamespace(config=config, initial=None)
    run_plainly(run, "features")
    assert done == ["prepare", "tell sets", "check names", "shard", "features"]
    done.clear()
    run_plainly(run, "score", ("decode", "score", "report"))
    assert done == ["decode", "score"]
    done.clear()
    run_plainly(run)
    assert done[-2:] == ["register", "report"]


def test_plain_run_refuses_a_runner_of_prefect(config, done):
    with pytest.raises(StageError, match="needs a flow run"):
        run_plainly(SimpleNamespace(config=parse_config(tiny_document(runner={"kind": "dask"}))))
    assert done == []


def test_task_of_a_stage_publishes_its_result_and_says_if_it_was_cached(config, done, caplog, monkeypatch):
    result = SimpleNamespace(url="file:///out", cached=True, counts={"utterances": 12})
    open_run(config, "a-run")
    assert open_run(config, "a-run") is stage_tasks._runs["a-run"]

    def execute(run):
        assert run is stage_tasks._runs["a-run"]
        progress.announce("prepare", "12 utterances")
        progress.announce("shard", "of another stage")
        return result

    prepare = SimpleNamespace(name="prepare", execute=execute)
    with caplog.at_level(logging.INFO, "tests.stages"):
        state = stage_tasks._call(prepare)("a-run")
    assert (state.name, state.message) == ("Cached", "12 utterances; file:///out")
    assert done == ["bar prepare", "finish", "publish file:///out"]
    assert [entry.message for entry in caplog.records if entry.name == "tests.stages"] == ["prepare: 12 utterances"]
    result.cached = False
    done.clear()
    monkeypatch.setattr(stage_tasks, "PREPARE", prepare)
    state = stage_tasks._call(prepare)("a-run")
    assert state.name == "Completed"
    assert done == ["bar prepare", "finish", "tell sets", "check names", "publish file:///out"]
    close_run("a-run")
    close_run("a-run")
    assert "a-run" not in stage_tasks._runs


def test_sizes_of_sets_and_duplicates_are_logged_before_training(config, monkeypatch, caplog):
    record = {"duplicates": {"same": 2}}
    monkeypatch.setattr(stage_tasks, "sets_text", lambda given: f"{given is record} sets")
    monkeypatch.setattr(
        stage_tasks, "doubles_of", lambda given, data: ["2", f"{given is record and data is config.data}"]
    )
    monkeypatch.setattr(stage_tasks, "data_warnings", lambda given, data: ["speakers", f"{data is config.data}"])
    run = SimpleNamespace(
        config=config,
        initial=None,
        trial=None,
        result=lambda name: SimpleNamespace(record=record) if name == "prepare" else None,
    )
    with caplog.at_level(logging.INFO, "tests.stages"):
        stage_tasks._tell_sets(run, logging.getLogger("tests.stages"))
        record["duplicates"] = {}
        stage_tasks._tell_sets(run, logging.getLogger("tests.stages"))
    assert [(entry.levelname, entry.message) for entry in caplog.records] == [
        ("INFO", "sets: True sets"),
        ("INFO", "duplicates: 2 True"),
        ("WARNING", "speakers"),
        ("WARNING", "True"),
        ("INFO", "sets: True sets"),
        ("WARNING", "speakers"),
        ("WARNING", "True"),
    ]
