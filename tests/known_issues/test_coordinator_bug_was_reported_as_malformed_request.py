"""A TypeError in the coordinator's own code was answered as "malformed request", which blamed the sender."""

import json

import pytest
from support import load_beside

from training.coordinator.core import Settings
from training.coordinator.epochs import Epoch
from training.coordinator.messages import (
    CoordinatorError,
    CoordinatorFailedError,
    Heartbeat,
    JoinRequest,
    StatusRequest,
    encode_request,
    read_reply,
)
from training.coordinator.server import CoordinatorServer

bookkeeping, emulated_nodes = (
    load_beside(__file__, f"../training/{name}.py") for name in ("bookkeeping", "emulated_nodes")
)
make_coordinator_process = emulated_nodes.make_coordinator_process


@pytest.fixture
def server(make_coordinator_process, tmp_path):
    settings = Settings.from_job(make_coordinator_process(nodes=1).job)
    (tmp_path / "coordinator").mkdir(exist_ok=True)
    coordinator = CoordinatorServer(settings, tmp_path / "coordinator", "tcp://127.0.0.1:0", None, fresh=True)
    yield coordinator
    coordinator.close()


def ask(server, request):
    return read_reply(request, server._answer(encode_request(request)))


def trained(*rows):
    return Heartbeat.model_validate(
        {"incarnation": "n0", "ready": True, "reports": [bookkeeping.report(n, [row]) for n, row in enumerate(rows, 1)]}
    )


def test_internal_error_is_reported_logged_and_rolled_back(server, monkeypatch, caplog):
    ask(server, JoinRequest(node=0, incarnation="n0", endpoints=()))
    assert ask(server, trained(3)).seq == 1
    train = Epoch.train

    def broken(self, rows):
        if 5 in rows:
            train(self, rows)  # changed, but not recorded
            raise TypeError("of our own")
        return train(self, rows)

    monkeypatch.setattr(Epoch, "train", broken)
    with pytest.raises(CoordinatorFailedError, match=r"TypeError\('of our own'\).*see its log") as failure:
        ask(server, trained(3, 4, 5))
    assert "malformed" not in str(failure.value)
    assert caplog.records[-1].exc_info
    status = ask(server, StatusRequest())
    assert (status.progress.trained, status.totals["utterances"]) == (2, 2)  # the report before the error is kept
    monkeypatch.undo()
    assert ask(server, trained(3, 4, 5)).seq == 3
    assert ask(server, StatusRequest()).progress.trained == 3


def test_malformed_request_is_not_reported_as_internal_error(server, caplog):
    for message in ({"op": "beat", "incarnation": "n0", "have": 7}, {"op": "join", "node": "x"}):
        with pytest.raises(CoordinatorError, match=r"malformed request: (beat\.have|join\.node)"):
            read_reply(StatusRequest(), server._answer(json.dumps(message).encode()))
    assert not caplog.records


def test_object_store_outage_ends_the_coordinator_and_nodes_retry(server, monkeypatch):
    """It is restarted; a refusal would have ended the node."""
    monkeypatch.setattr(server.coordinator.admission, "join", lambda _: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        ask(server, JoinRequest(node=0, incarnation="n0", endpoints=()))
