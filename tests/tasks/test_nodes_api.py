"""Requests about node runs, to a client that records them; tests/flows/test_node_flow.py asks a real server."""

from contextlib import contextmanager
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

from tasks.orchestration import nodes_api
from tasks.orchestration.nodes_api import PrefectApi


class Client:
    """Prefect's client as far as node runs need it; idempotent as the server is."""

    def __init__(self):
        self.made, self.requests, self.retries = {}, [], set()

    def read_deployment_by_name(self, name):
        self.requests.append(name)
        return SimpleNamespace(id=UUID(int=99))

    def create_flow_run_from_deployment(self, deployment, *, name, parameters, idempotency_key, tags):
        self.retries.add(PREFECT_CLIENT_MAX_RETRIES.value())
        run = SimpleNamespace(id=UUID(int=len(self.made) + 1), name=name, parameters=parameters, tags=tags, state=None)
        self.requests.append(deployment)
        return self.made.setdefault(idempotency_key, run)

    def read_flow_runs(self, *, flow_run_filter, limit=None):
        wanted = flow_run_filter.id.any_ if flow_run_filter.id else None
        tags = set(flow_run_filter.tags.all_) if flow_run_filter.tags else set()
        runs = [run for run in self.made.values() if wanted is None or run.id in wanted]
        return [run for run in runs if tags <= set(run.tags)][:limit]

    def set_flow_run_state(self, run, state):
        next(run_made for run_made in self.made.values() if run_made.id == run).state = state


@pytest.fixture
def client(monkeypatch):
    made = Client()

    @contextmanager
    def opened():
        yield made

    monkeypatch.setattr(nodes_api, "_client", opened)
    return made


def test_started_run_is_returned_by_its_id_and_is_the_same_for_the_same_key(client):
    with PrefectApi("ring", "k1") as api:
        first, second = (api.start(rank, {"node_rank": rank}, f"key-{rank}") for rank in (0, 1))
        assert api.start(1, {"node_rank": 1}, "key-1") == second
    assert (first, second) == (UUID(int=1), UUID(int=2))
    assert client.requests == ["node/ring", *[UUID(int=99)] * 3]
    run = client.made["key-1"]
    assert (run.name, run.parameters) == ("node 1 of training-k1", {"node_rank": 1})
    assert run.tags == ["starling-node", "training-k1"]
    assert client.retries == {1}  # an unreachable server is not waited for


def test_states_are_those_of_the_runs_that_were_asked_for(client, monkeypatch):
    monkeypatch.setattr(nodes_api, "_PAGE", 2)
    with PrefectApi("ring", "k1") as api:
        runs = [api.start(rank, {}, f"key-{rank}") for rank in range(5)]
        for number, run in enumerate(client.made.values()):
            state = SimpleNamespace(type=StateType.CRASHED, message="" if number else "no memory", name="Crashed")
            run.state = None if number == 3 else state
        states = api.states(runs[:4])
    assert states == {
        runs[0]: ("CRASHED", "no memory"),
        **dict.fromkeys(runs[1:3], ("CRASHED", "Crashed")),
    }


def test_runs_left_are_those_of_the_training_and_can_be_cancelled(client):
    with PrefectApi("ring", "k1") as api, PrefectApi("ring", "k2") as other:
        run = api.start(0, {"node_rank": 0}, "a")
        other.start(0, {"node_rank": 7}, "b")
        assert api.left() == {run: {"node_rank": 0}}
        api.cancel(run)
    assert client.made["a"].state.name == "Cancelling"
    assert client.made["b"].state is None
