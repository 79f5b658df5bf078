"""Whose turn it is: a schedule's run yields to one that is going, a person's does not."""

import signal
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelling, Running
from support import load_beside, tiny_document

from flows import pipeline, turns
from tasks import leases
from tasks.config import parse_config
from tasks.holder import Holder
from tasks.leases import LeaseTable, impatient_client
from tasks.slots import lock_name

variables_server = load_beside(__file__, "../tasks/variables_server.py").variables_server


def a_run(deployment, **fields):
    plain = {"name": "mine", "auto_scheduled": True, "run_count": 1, "id": uuid4(), "deployment_id": deployment}
    return SimpleNamespace(**plain | fields)


@pytest.fixture
def going(monkeypatch):
    """A deployment of which a run is going on another machine; its id."""
    monkeypatch.setattr(leases, "_WAITS_S", (0.0, 0.0))
    deployment = uuid4()
    with variables_server(), impatient_client() as client:
        holder = replace(Holder.here("nightly"), place="far/boot/ns")
        LeaseTable(client).take(lock_name("deployment", str(deployment)), holder)
        yield deployment


def test_a_schedules_run_is_skipped_while_another_is_going(going):
    state = turns._as_deployed(a_run(going), lambda: "done")
    assert (state.type.value, state.name) == ("CANCELLED", "Skipped")
    assert "this deployment is run by run nightly" in state.message


@pytest.mark.parametrize("fields", [{"auto_scheduled": False}, {"run_count": 2}, {"deployment_id": None}])
def test_a_run_that_somebody_asked_for_goes_on(going, fields):
    assert turns._as_deployed(a_run(going, **fields), lambda: "done") == "done"


def test_another_deployments_run_does_not_matter(going):
    assert turns._as_deployed(a_run(uuid4()), lambda: "done") == "done"


@pytest.mark.parametrize(("state", "said"), [(Cancelling(), ["CANCELLED"]), (Running(), [])])
def test_a_run_that_ends_because_it_is_cancelled_says_so_itself(monkeypatch, state, said):
    """A run that is told to end without being cancelled (its machine shuts down) has crashed, which Prefect says."""
    told = []

    class Client(nullcontext):
        def read_flow_run(self, identity):
            return SimpleNamespace(state=state)

        def set_flow_run_state(self, identity, ended, force):
            told.append(ended.type.value)

    monkeypatch.setattr(turns, "impatient_client", lambda: Client(Client()))
    with pytest.raises(TerminationSignal), turns.prompt_end(a_run(None)):
        raise TerminationSignal(signal.SIGTERM)
    assert told == said


def test_the_retry_of_a_flow_run_has_the_same_run_id(monkeypatch):
    config = parse_config(tiny_document())
    run = SimpleNamespace(id=uuid4(), created=datetime(2026, 11, 21, 2, 15, tzinfo=UTC))
    monkeypatch.setattr(pipeline.FlowRunContext, "get", classmethod(lambda cls: SimpleNamespace(flow_run=run)))
    assert pipeline.new_run_id(config) == f"tiny-20261121-021500-{run.id.hex[-4:]}" == pipeline.new_run_id(config)
    monkeypatch.setattr(pipeline.FlowRunContext, "get", classmethod(lambda cls: None))
    assert pipeline.new_run_id(config) != pipeline.new_run_id(config)


def test_run_names_say_corpus_and_model():
    sources = [{"kind": "librispeech", "path": "/data/LibriSpeech"}, {"kind": "kaldi", "path": "/d/x", "corpus": "lab"}]
    config = parse_config(tiny_document(data={"sources": sources, "sample_rate": 8000}))
    assert config.corpora == "LibriSpeech, lab"
    assert pipeline.pipeline.flow_run_name.format(config=config) == "tiny: LibriSpeech, lab conformer"
