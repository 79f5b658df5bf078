"""The error of a coordinator that does not answer was a ValueError, so it counted as a mistake and was not retried."""

import pytest

from tasks.failures import passes
from tasks.tracking.training_lookup import LocalTraining
from training.coordinator.client import CoordinatorClient
from training.coordinator.messages import (
    CoordinatorError,
    CoordinatorFailedError,
    CoordinatorUnreachableError,
    StatusRequest,
)
from training.coordinator.node_client import NodeClient
from training.node.agent import NodeError, fetch_job

NOBODY = "127.0.0.1:9"


def test_unanswered_request_is_a_transient_failure():
    with CoordinatorClient(NOBODY, None) as client, pytest.raises(CoordinatorUnreachableError) as caught:
        client.request(StatusRequest(), patience_s=0.1)
    assert passes(caught.value)
    assert not isinstance(caught.value, ValueError)
    assert not passes(CoordinatorError("there is no machine 3 of node 0"))
    assert not passes(CoordinatorFailedError("the coordinator failed"))


def test_node_without_job_may_be_restarted():
    with pytest.raises(NodeError) as caught:
        fetch_job(NOBODY, None, patience_s=0.1)
    assert passes(caught.value)


def test_node_leaves_without_error_when_coordinator_is_silent(tmp_path, caplog):
    client = NodeClient(NOBODY, None, 0, folder=tmp_path)
    client._state.incarnation = "it has joined"
    client.leave(patience_s=0.2)
    client.close()
    assert "could not sign off" in caplog.text


def test_local_training_view_works_without_the_coordinator(tmp_path, monkeypatch):
    (tmp_path / "coordinator.json").write_text(f'{{"address": "{NOBODY}"}}')
    (tmp_path / "journal.jsonl").touch()
    monkeypatch.setattr("tasks.tracking.training_lookup.is_running", lambda _: True)
    monkeypatch.setattr("tasks.tracking.training_lookup._LOCAL_ANSWER_S", 0.05)
    watched = LocalTraining(tmp_path)
    assert watched.poll()
    assert watched.coordinator is None
    watched.close()
