"""Requests of `deploy` to a Prefect server; test_automations.py tests that a real server accepts them."""

from contextlib import contextmanager
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from support import ROOT, tiny_document

from flows.deploy import automations, deployments
from flows.deploy.automations import PREFIX, apply, heartbeat_automation
from flows.deploy.deployments import Options, deploy
from flows.deploy.pools import PoolError, WorkPool, make_pool
from tasks.config.pipeline import parse_config


class Server:
    """Remembers work pools, queues, deployments and automations."""

    def __init__(self):
        self.pools, self.queues, self.flows, self.deployments = {}, [], {}, {}
        self.automations, self.changes = [], []

    def create_work_pool(self, pool):
        if pool.name in self.pools:
            raise ObjectAlreadyExists(None)
        self.pools[pool.name] = SimpleNamespace(type=pool.type, template=pool.base_job_template)

    def read_work_pool(self, name):
        return self.pools[name]

    def create_work_queue(self, name, work_pool_name):
        if (work_pool_name, name) in self.queues:
            raise ObjectAlreadyExists(None)
        self.queues.append((work_pool_name, name))

    def create_flow_from_name(self, name):
        return self.flows.setdefault(name, UUID(int=len(self.flows)))

    def create_deployment(self, flow_id, name, **fields):
        flow = next(flow for flow, number in self.flows.items() if number == flow_id)
        self.deployments[f"{flow}/{name}"] = SimpleNamespace(**fields)
        return f"id of {flow}/{name}"

    def read_deployment_by_name(self, name):
        if name not in self.deployments:
            raise ObjectNotFound(None)
        return self.deployments[name]

    def read_automations_by_name(self, name):
        return [automation for automation in self.automations if automation.name == name]

    def create_automation(self, automation):
        self.changes.append(("create", automation.name))
        number = UUID(int=len(self.changes))
        self.automations.append(
            SimpleNamespace(
                id=number, name=automation.name, enabled=automation.enabled, model_dump=automation.model_dump
            )
        )

    def update_automation(self, number, automation):
        self.changes.append(("update", automation.name, automation.enabled))
        known = next(other for other in self.automations if other.id == number)
        known.enabled, known.model_dump = automation.enabled, automation.model_dump

    def delete_automation(self, number):
        self.changes.append(("delete", number))
        self.automations = [automation for automation in self.automations if automation.id != number]


@pytest.fixture
def server(monkeypatch):
    made = Server()

    @contextmanager
    def get_client(sync_client):
        assert sync_client
        yield made

    monkeypatch.setattr("prefect.client.orchestration.get_client", get_client)
    # of every flow it takes seconds, and is tested separately
    form = SimpleNamespace(model_dump_for_openapi=dict)
    monkeypatch.setattr("prefect.utilities.callables.parameter_schema", lambda flow: form)
    return made


@pytest.fixture
def config():
    document = tiny_document()
    document["train"] |= {"strategy": "adpsgd", "nodes": 2, "launch": {"kind": "prefect", "pool": "gpus"}}
    return parse_config(document)


def test_every_deployment_is_registered_in_its_pool_with_its_schedule(server, config):
    done = deploy(config, Options(WorkPool("here"), "Asia/Tokyo"))
    assert [entry["deployment"] for entry in done][:3] == ["pipeline/tiny", "evaluate/tiny", "watch/tiny"]
    assert done[0] == {
        "deployment": "pipeline/tiny",
        "schedule": "15 2 * * *",
        "timezone": "Asia/Tokyo",
        "id": "id of pipeline/tiny",
    }
    assert done[-1]["deployment"] == "node/tiny"
    assert {pool: work_pool.type for pool, work_pool in server.pools.items()} == {"here": "process", "gpus": "process"}
    assert server.queues == [("gpus", "nodes")]
    nightly, node = server.deployments["pipeline/tiny"], server.deployments["node/tiny"]
    assert (nightly.work_pool_name, nightly.work_queue_name) == ("here", "default")
    assert (node.work_pool_name, node.work_queue_name) == ("gpus", "nodes")
    (schedule,) = nightly.schedules
    assert (schedule.schedule.cron, schedule.schedule.timezone) == ("15 2 * * *", "Asia/Tokyo")
    assert (schedule.active, schedule.slug) == (True, "starling")
    assert server.deployments["train/tiny"].schedules == []
    assert nightly.entrypoint == "flows/pipeline.py:pipeline"
    assert nightly.parameters["config"]["name"] == "tiny"
    assert nightly.enforce_parameter_schema
    assert nightly.job_variables["env"] == {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    (step,) = nightly.pull_steps
    assert list(step.values()) == [{"directory": str(ROOT)}]


def test_paused_schedule_stays_paused(server, config):
    deploy(config)
    server.deployments["watch/tiny"].schedules[0].active = False
    deploy(config)
    active = {
        name: [schedule.active for schedule in deployment.schedules] for name, deployment in server.deployments.items()
    }
    assert active["watch/tiny"] == [False]
    assert active["pipeline/tiny"] == [True]
    assert server.queues == [("gpus", "nodes")]


def test_containers_use_the_code_of_their_image(server, config):
    deploy(config, Options(WorkPool("boxes", "docker", "i:1")))
    (step,) = server.deployments["pipeline/tiny"].pull_steps
    assert next(iter(step.values()))["directory"].endswith("site-packages")
    assert server.pools["boxes"].template["variables"]["properties"]["image"]["default"]
    assert server.pools["gpus"].type == "docker"


def test_pool_of_another_type_is_refused_and_unchanged(server):
    make_pool(server, WorkPool("here"), "nodes")
    before = dict(server.pools)
    make_pool(server, WorkPool("here"), "nodes")
    with pytest.raises(PoolError, match="'here' exists and has the type process, not docker: .*--pool"):
        make_pool(server, WorkPool("here", "docker"))
    assert (server.pools, server.queues) == (before, [("here", "nodes")])


def test_folds_and_watched_folders_are_parameters(config):
    plain = {entry["entrypoint"]: entry["parameters"] for entry in deployments.plan(config)}
    assert "prefixes" not in plain["flows/watch.py:watch"]
    assert plain["flows/folds.py:crossvalidate"]["folds"] == 5
    assert plain["flows/node.py:node"] == {}
    assert plain["flows/pipeline.py:evaluate"]["only_waiting"]
    folded = config.model_copy(update={"data": config.data.model_copy(update={"folds": 3})})
    entries = deployments.plan(folded, Options(watched=("s3://a", "s3://b")))
    given = {entry["entrypoint"]: entry["parameters"] for entry in entries}
    assert given["flows/folds.py:crossvalidate"]["folds"] == 3
    assert given["flows/watch.py:watch"]["prefixes"] == ["s3://a", "s3://b"]
    assert "prefixes" not in given["flows/pipeline.py:pipeline"]


# --- automations


@pytest.fixture
def webhook(monkeypatch):
    """The block with the address, if there is one."""
    given = []
    monkeypatch.setattr(automations, "_webhook", lambda url: given.append(url) or (str(UUID(int=9)) if url else ""))
    return given


def test_automations_are_created_once_and_updated(server, config, webhook, monkeypatch):
    deployed = [{"deployment": f"{name}/tiny", "id": str(UUID(int=7))} for name in ("ingest", "train")]
    names = apply([config], deployed)
    assert names == [f"{PREFIX}a silent run has crashed", f"{PREFIX}ingest tiny when its corpus changes"]
    assert server.changes == [("create", name) for name in names]
    (action,) = server.automations[1].model_dump(mode="json")["actions"]
    assert action["deployment_id"] == str(UUID(int=7))
    apply([config], deployed)
    assert len(server.changes) == 2  # an update would reset the count of its trigger
    server.automations[0].enabled = False
    monkeypatch.setattr(automations, "CRASHED_MESSAGE", "another message")
    apply([config], deployed)
    assert server.changes[2:] == [("update", names[0], False)]  # paused automations stay paused
    told = apply([config], deployed, "https://hook")
    assert told[:2] == names
    assert told[2:] == [f"{PREFIX}tell of failed and crashed runs", f"{PREFIX}tell of champions"]
    assert webhook == ["", "", "", "https://hook"]


def test_duplicate_automations_are_reduced_to_one(server, config, webhook):
    from prefect.events.schemas.automations import AutomationCore

    for _ in range(3):
        server.create_automation(AutomationCore.model_validate(heartbeat_automation()))
    apply([], [])
    assert [change[0] for change in server.changes] == ["create"] * 3 + ["delete"] * 2
    assert len(server.automations) == 1


def test_order_and_number_types_of_a_trigger_are_ignored():
    same = {"id": 1, "expect": ["b", "a"], "match": {"x": [{"id": 3, "y": 1}]}}
    other = {"expect": ["a", "b"], "match": {"x": [{"y": 1}]}, "id": 2}
    assert automations._sorted(same) == automations._sorted(other)
    assert automations._sorted(same) != automations._sorted(other | {"expect": ["a"]})
