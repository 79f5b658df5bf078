"""After a kill -9 during `register` or a training, MLflow showed its run as running for ever."""

import json
import subprocess
from dataclasses import asdict, replace

import pytest
from support import give_mlflow, tiny_document

from tasks.config.pipeline import parse_config
from tasks.locking.lock_owner import LockOwner
from tasks.stages.base import Run
from tasks.tracking.runs import ENDED_TAG, KEY_TAG, OWNER_TAG, TrainingRun, client, end_abandoned, open_training_run
from tasks.tracking.stage_runs import log_stage
from training.processes.identity import ProcessIdentity


@pytest.fixture
def api(home):
    give_mlflow(home)
    return client()


@pytest.fixture
def killed():
    """The owner tag of a process that was killed."""
    process = subprocess.Popen(["sleep", "60"])
    owner = replace(LockOwner.here("killed"), pid=process.pid, started=ProcessIdentity.of(process.pid).started)
    process.kill()
    process.wait()
    return {OWNER_TAG: json.dumps(asdict(owner))}


def opened(api, name, tags=None):
    run = open_training_run(api, TrainingRun(name, "tiny", name))
    for tag, value in (tags or {}).items():
        api.set_tag(run.info.run_id, tag, value)
    return run


def status(api, run):
    return api.get_run(run.info.run_id).info.status


def test_next_training_ends_the_run_of_a_killed_process(api, killed):
    abandoned, living = opened(api, "abandoned", killed), opened(api, "living")
    opened(api, "next")
    ended = api.get_run(abandoned.info.run_id)
    assert (ended.info.status, ended.info.end_time is not None) == ("KILLED", True)
    assert "its process ended before it could say why (run killed, process" in ended.data.tags[ENDED_TAG]
    assert status(api, living) == "RUNNING"


def test_next_stage_run_ends_the_run_of_a_killed_process(api, killed):
    abandoned = opened(api, "abandoned", killed)
    log_stage(Run(parse_config(tiny_document()), "next"), "features", "0123", {})
    assert status(api, abandoned) == "KILLED"


def test_continued_run_belongs_to_the_process_that_continues_it(api, killed):
    continued = opened(api, "continued", killed)
    opened(api, "continued")
    opened(api, "next")
    assert status(api, continued) == "RUNNING"


def test_runs_without_an_owner_are_kept_unless_they_have_the_same_key(api):
    runs = {key: opened(api, key, {OWNER_TAG: "not JSON", KEY_TAG: key}) for key in ("ours", "theirs")}
    end_abandoned(api, runs["ours"].info.experiment_id, "", "ours")
    assert [status(api, runs[key]) for key in ("ours", "theirs")] == ["KILLED", "RUNNING"]
