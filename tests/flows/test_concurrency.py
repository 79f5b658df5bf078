"""A scheduled run yields to one in progress; a run that was started by hand does not."""

import os
import signal
import threading
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelling, Completed, Pending, Running
from support import load_beside, tiny_document

from flows import folds, names, pipeline, promote, verify, watch
from flows.deploy import concurrency
from tasks.config.pipeline import parse_config
from tasks.locking import leases
from tasks.locking.leases import LeaseTable, impatient_client
from tasks.locking.lock_owner import LockOwner
from tasks.locking.slots import lock_name

variables_server = load_beside(__file__, "../tasks/variables_server.py").variables_server


def a_run(deployment, **fields):
    plain = {"name": "mine", "auto_scheduled": True, "run_count": 1, "id": uuid4(), "deployment_id": deployment}
    return SimpleNamespace(**plain | fields)


@pytest.fixture
def run_in_progress(monkeypatch):
    """A deployment with a run in progress on another machine; its id."""
    monkeypatch.setattr(leases, "_WAITS_S", (0.0, 0.0))
    deployment = uuid4()
    with variables_server(), impatient_client() as client:
        holder = replace(LockOwner.here("nightly"), place="far/boot/ns")
        LeaseTable(client).take(lock_name("deployment", str(deployment)), holder)
        yield deployment


def test_scheduled_run_is_skipped_while_another_is_in_progress(run_in_progress):
    state = concurrency._as_deployed(a_run(run_in_progress), lambda: "done")
    assert (state.type.value, state.name) == ("CANCELLED", "Skipped")
    assert "this deployment is already running: run nightly" in state.message


@pytest.mark.parametrize("fields", [{"auto_scheduled": False}, {"run_count": 2}, {"deployment_id": None}])
def test_manually_started_run_continues(run_in_progress, fields):
    assert concurrency._as_deployed(a_run(run_in_progress, **fields), lambda: "done") == "done"


def test_run_of_another_deployment_is_ignored(run_in_progress):
    assert concurrency._as_deployed(a_run(uuid4()), lambda: "done") == "done"


class Client(nullcontext):
    """A server on which all runs are in one state, and some are due.

    Attributes:
        told: The states that were set, by run id.
        asked: The filters of the last listing.
    """

    def __init__(self, state, due=()):
        super().__init__(self)
        self.state, self.due, self.told, self.asked, self.reads = state, due, {}, {}, 0

    def read_flow_run(self, identity):
        self.reads += 1
        return SimpleNamespace(state=self.state)

    def read_flow_runs(self, **filters):
        self.asked = filters
        return self.due

    def set_flow_run_state(self, identity, state, force=False):
        self.told[identity] = state


def fake_client(monkeypatch, *fields, **more):
    client = Client(*fields, **more)
    monkeypatch.setattr(concurrency, "impatient_client", lambda: client)
    return client


@pytest.mark.parametrize(("state", "said"), [(Cancelling(), ["CANCELLED"]), (Running(), [])])
def test_cancelled_run_sets_its_own_state(monkeypatch, state, said):
    """A run that ends without being cancelled, since its machine shuts down, has crashed, and Prefect says so."""
    client = fake_client(monkeypatch, state)
    with pytest.raises(TerminationSignal), concurrency.prompt_end(a_run(None)):
        raise TerminationSignal(signal.SIGTERM)
    assert [state.type.value for state in client.told.values()] == said


def test_run_within_a_cancelled_run_is_cancelled_too(monkeypatch):
    client, outer, inner = fake_client(monkeypatch, Running()), a_run(None), a_run(None)
    states = {outer.id: Cancelling(), inner.id: Running()}
    monkeypatch.setattr(client, "read_flow_run", lambda identity: SimpleNamespace(state=states[identity]))
    with pytest.raises(TerminationSignal), concurrency.prompt_end(outer), concurrency.prompt_end(inner):
        raise TerminationSignal(signal.SIGTERM)
    assert {run: state.type.value for run, state in client.told.items()} == dict.fromkeys(states, "CANCELLED")


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), TerminationSignal(signal.SIGTERM)], ids=["int", "term"])
def test_run_interrupted_in_its_terminal_is_cancelled(monkeypatch, raised):
    """Prefect's engine drops a KeyboardInterrupt once the state is final; the run then continues."""
    client, run = fake_client(monkeypatch, Running()), a_run(None)
    monkeypatch.setattr(concurrency, "interrupted", lambda: True)
    monkeypatch.setattr(concurrency, "shutdown_signal", lambda: signal.SIGINT)
    with pytest.raises(TerminationSignal), concurrency.prompt_end(run):
        raise raised
    assert client.told[run.id].is_cancelled()
    assert run.state is client.told[run.id]
    assert concurrency._open == []


@pytest.fixture
def watch_run(monkeypatch):
    """Watches a run for a while; the signals that it sent."""

    def heed(state, seconds=0.2, over=None):
        client, sent = fake_client(monkeypatch, state), []
        monkeypatch.setattr(concurrency, "_LOOK_S", 0.01)
        monkeypatch.setattr(concurrency.os, "kill", lambda pid, number: sent.append((pid, number)))
        over = over or threading.Event()
        late = threading.Timer(seconds, over.set)
        late.start()
        concurrency._heed(uuid4(), over)
        late.cancel()
        return client, sent

    return heed


@pytest.mark.parametrize("state", [Running(), Pending(), Completed(), None])
def test_run_that_is_not_cancelled_gets_no_signal(watch_run, state):
    client, sent = watch_run(state)
    assert client.reads
    assert sent == []


def test_cancelled_run_gets_one_signal(watch_run):
    assert watch_run(Cancelling(), seconds=60)[1] == [(os.getpid(), signal.SIGTERM)]


def test_finished_run_gets_no_signal(watch_run):
    over = threading.Event()
    state = SimpleNamespace(is_cancelling=lambda: over.set() or True)
    assert watch_run(state, over=over)[1] == []


def test_interrupted_run_that_ends_late_is_marked_cancelled(watch_run, monkeypatch):
    monkeypatch.setattr(concurrency, "interrupted", lambda: True)
    monkeypatch.setattr(concurrency, "shutdown_signal", lambda: signal.SIGINT)
    monkeypatch.setattr(concurrency, "left_s", lambda: concurrency._LAST_S)
    runs = [a_run(None), a_run(None)]
    monkeypatch.setattr(concurrency, "_open", runs)
    client, sent = watch_run(Running(), seconds=60)
    assert sent == []
    assert all(client.told[run.id].is_cancelled() for run in runs)


def test_only_scheduled_runs_not_yet_started_are_skipped(monkeypatch):
    deployment = uuid4()
    mine = a_run(deployment)
    due = a_run(deployment, run_count=0)
    others = [
        mine,
        a_run(deployment, run_count=1),
        a_run(deployment, run_count=0, auto_scheduled=False),
        a_run(deployment, run_count=0, id=mine.id),
    ]
    client = Client(Running(), due=[*others, due])
    concurrency._skipper(mine)(client)
    assert list(client.told) == [due.id]
    assert (client.told[due.id].type.value, client.told[due.id].name) == ("CANCELLED", "Skipped")
    runs, deployments = client.asked["flow_run_filter"], client.asked["deployment_filter"]
    assert deployments.id.any_ == [deployment]
    assert [kind.value for kind in runs.state.type.any_] == ["SCHEDULED"]
    assert abs((runs.expected_start_time.before_ - datetime.now(UTC)).total_seconds()) < 600


def test_retry_of_a_flow_run_has_the_same_run_id(monkeypatch):
    config = parse_config(tiny_document())
    run = SimpleNamespace(id=uuid4(), created=datetime(2026, 11, 21, 2, 15, tzinfo=UTC), auto_scheduled=False)
    monkeypatch.setattr(names.FlowRunContext, "get", classmethod(lambda cls: SimpleNamespace(flow_run=run)))
    assert names.new_run_id(config) == f"tiny-20261121-021500-{run.id.hex[-6:]}" == names.new_run_id(config)
    monkeypatch.setattr(names.FlowRunContext, "get", classmethod(lambda cls: None))
    assert names.new_run_id(config) != names.new_run_id(config)


def test_run_names_contain_id_corpus_and_model(monkeypatch):
    sources = [{"kind": "librispeech", "path": "/data/LibriSpeech"}, {"kind": "kaldi", "path": "/d/x", "corpus": "lab"}]
    config = parse_config(tiny_document(data={"sources": sources, "sample_rate": 8000}))
    assert config.corpora == "LibriSpeech, lab"
    run = SimpleNamespace(id=uuid4(), created=datetime(2026, 11, 21, 2, 15, tzinfo=UTC), auto_scheduled=False)
    monkeypatch.setattr(names.FlowRunContext, "get", classmethod(lambda cls: SimpleNamespace(flow_run=run)))
    stamp = f"20261121-021500-{run.id.hex[-6:]}"

    def named(flow, **parameters):
        monkeypatch.setattr(names, "flow_run", SimpleNamespace(parameters={"config": config, **parameters}))
        monkeypatch.setattr(promote, "flow_run", names.flow_run)
        return flow.flow_run_name()

    assert named(pipeline.pipeline) == f"tiny-{stamp}: LibriSpeech, lab, conformer"
    assert named(pipeline.train, run_id="") == f"train tiny-{stamp}: LibriSpeech, lab, conformer"
    assert named(pipeline.ingest, run_id="nightly") == "ingest nightly: LibriSpeech, lab"
    assert named(folds.crossvalidate, folds=5) == f"tiny-{stamp}: LibriSpeech, lab, 5 folds"
    assert named(watch.watch) == f"watch tiny {stamp}"
    assert named(verify.verify_storage) == f"verify storage of tiny {stamp}"
    assert named(promote.promote) == f"promote {config.model_name} {stamp}"
    assert parse_config(tiny_document(data={"sources": [{"kind": "synthetic"}]})).corpora == "synthetic"
