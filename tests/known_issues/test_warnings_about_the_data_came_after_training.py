"""A run warned that validation knows all voices and the test set none, but on the terminal only at its end."""

import logging
from types import SimpleNamespace

import pytest
from support import tiny_document

from tasks.config.pipeline import parse_config
from tasks.orchestration import stage_tasks
from tasks.stages import progress


@pytest.fixture
def executed(monkeypatch):
    """What happens in a run, in order; the data deserve a warning."""
    happened = []

    def stage(name):
        return SimpleNamespace(name=name, execute=lambda run: happened.append(name))

    monkeypatch.setattr(stage_tasks, "get_stage", stage)
    monkeypatch.setattr(stage_tasks, "initial_model", lambda run: None)
    monkeypatch.setattr(stage_tasks, "check_names", lambda run: None)
    monkeypatch.setattr(stage_tasks, "sets_text", lambda record: "sets")
    monkeypatch.setattr(stage_tasks, "data_warnings", lambda record, data: ["no new voice"])
    return happened


def a_run(trial=None, **data):
    config = parse_config(tiny_document(data=data) if data else tiny_document())
    return SimpleNamespace(config=config, trial=trial, result=lambda name: SimpleNamespace(record={"duplicates": {}}))


def test_a_warning_is_a_line_before_the_next_stage(executed, caplog):
    with progress.following(lambda stage, text: executed.append(f"{stage}: {text}")):
        stage_tasks.run_plainly(a_run(), stages=["prepare", "shard", "train"])
    assert executed == ["prepare", "prepare: warning: no new voice", "shard", "train"]
    assert not [entry for entry in caplog.records if entry.levelname == "WARNING"]  # which a terminal would show, too


def test_it_is_logged_where_nobody_follows_lines(executed, caplog):
    stage_tasks.run_plainly(a_run(), stages=["prepare"])
    assert [entry.message for entry in caplog.records if entry.levelname == "WARNING"] == ["no new voice"]


def test_trials_do_not_repeat_it(executed):
    with progress.following(lambda stage, text: executed.append(text)):
        stage_tasks.run_plainly(a_run(trial=object()), stages=["prepare"])
    assert executed == ["prepare"]


def test_prefect_has_it_as_a_warning_besides(executed, caplog):
    with progress.following(lambda stage, text: executed.append(text)):
        stage_tasks._tell_sets(a_run(), logging.getLogger("tests.prefect"))
    assert executed == ["warning: no new voice"]
    assert [entry.message for entry in caplog.records if entry.levelname == "WARNING"] == ["no new voice"]
