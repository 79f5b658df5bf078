"""A forwarder that was still connecting to MLflow after its training, and the register stage, both created a run.

A busy machine took more than 20 seconds for the first connection; `starling runs` then listed the run twice.
"""

import threading

import pytest
from support import give_mlflow

from tasks.tracking import forwarding, runs
from tasks.tracking.forwarding import Forwarder, Sender, send_rest
from tasks.tracking.runs import TrainingRun, client

ABOUT = TrainingRun("t-1", "slow", "run")


@pytest.fixture
def journal(home, tmp_path):
    give_mlflow(home)
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "start", "step": 0, "run": "t-1"}\n')
    return path


def test_the_register_stage_waits_for_the_run_of_a_forwarder_that_connects(journal, monkeypatch):
    note = journal.with_name("note.json")
    connecting, waited = threading.Event(), threading.Event()
    search, lock = runs.find_training_run, forwarding.file_lock

    def slowly(api, about):
        found = search(api, about)
        if threading.current_thread().name == "forward":
            connecting.set()
            assert waited.wait(240)
        return found

    def watched(path, wait_s):
        return lock(path, wait_s, on_wait=lambda _: waited.set())

    monkeypatch.setattr(runs, "find_training_run", slowly)
    monkeypatch.setattr(forwarding, "file_lock", watched)
    forwarder = Forwarder(Sender(journal, note, ABOUT))
    with forwarder:
        assert not forwarder.stop("FINISHED", 0.0)
        assert connecting.wait(240)
        run_id = send_rest(journal, note, ABOUT)
        waited.set()
        assert forwarder.stop("FINISHED", 240.0)
    api = client()
    (run,) = api.search_runs([api.get_experiment_by_name("slow").experiment_id])
    assert run.info.run_id == run_id
