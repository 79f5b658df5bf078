import json
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from prefect.client.schemas.schedules import CronSchedule
from prefect.utilities.callables import parameter_schema
from support import ROOT, tiny_document, write_config
from typer.testing import CliRunner

from flows import pipeline
from flows.cli.app import app
from flows.deploy.automations import QUIET_STATES
from flows.deploy.deployments import DEPLOYED_TAG, HEARTBEAT_S, SCHEDULED, Options, plan, prefect_yaml
from flows.deploy.pools import KINDS, PoolError, WorkPool
from flows.names import TAG, new_run_id
from tasks.config.pipeline import load_config, parse_config

FLOWS = [item for item in SCHEDULED if item.module != "promote" or (ROOT / "flows" / "promote.py").is_file()]


def ring(pool="gpus"):
    document = tiny_document()
    document["train"] |= {"strategy": "adpsgd", "nodes": 2, "launch": {"kind": "prefect", "pool": pool}}
    return parse_config(document)


def test_scheduled_deployments_and_their_times():
    schedules = {item.flow: item.cron for item in SCHEDULED}
    assert all(CronSchedule(cron=cron, timezone="UTC") for cron in schedules.values() if cron)
    assert all(item.about.endswith(".") for item in SCHEDULED)
    minute, hour, *rest = schedules["pipeline"].split()
    assert (minute.isdigit(), hour.isdigit(), rest) == (True, True, ["*"] * 3)  # nightly
    minute, *rest = schedules["evaluate"].split()
    assert (minute.isdigit(), rest) == (True, ["*"] * 4)  # hourly
    assert schedules["verify-storage"].split()[2:] == ["*", "*", "0"]  # weekly
    assert {name for name, cron in schedules.items() if not cron} == {
        "ingest",
        "train",
        "crossvalidate",
        "search",
        "promote",
    }


@pytest.mark.parametrize("item", FLOWS, ids=lambda item: item.flow)
def test_every_deployments_flow_accepts_its_parameters(item):
    flow = item.load()
    assert flow.name == item.flow
    assert (ROOT / item.entrypoint.partition(":")[0]).is_file()
    config = parse_config(tiny_document(register={"model": "other"}))
    (entry,) = [deployment for deployment in plan(config) if deployment["entrypoint"] == item.entrypoint]
    sent = json.loads(json.dumps(entry["parameters"]))
    assert flow.validate_parameters(sent)["config"] == config


def test_parameter_form_describes_the_configurations_fields():
    schema = parameter_schema(pipeline.pipeline).model_dump_for_openapi()
    fields = schema["definitions"]["PipelineConfig"]["properties"]
    assert {"name", "seed", "data", "features", "model", "train", "decode", "score", "register"} <= set(fields)
    definitions = schema["definitions"]

    def described(entry):  # a field that is described like its type refers to the type
        return entry.get("description") or definitions[entry["$ref"].rpartition("/")[2]]["description"]

    missing = [
        f"{name}.{field}"
        for name, definition in definitions.items()
        for field, entry in definition.get("properties", {}).items()
        if not described(entry)
    ]
    assert missing == []
    assert schema["properties"]["force_from"]["description"].startswith("Run this stage and all later ones again")


@pytest.mark.parametrize("item", FLOWS, ids=lambda item: item.flow)
def test_every_parameter_of_a_deployment_is_described(item):
    properties = parameter_schema(item.load()).model_dump_for_openapi()["properties"]
    assert [name for name, entry in properties.items() if not entry.get("description")] == []


def test_run_names_are_unique_and_sort_by_time():
    config = parse_config(tiny_document())
    names = {new_run_id(config) for _ in range(50)}
    assert len(names) == 50
    stamp = datetime.strptime(min(names).rsplit("-", 1)[0], "tiny-%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - stamp) < timedelta(minutes=2)


def test_automation_knows_every_final_state_of_a_flow():
    import re

    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "flows").rglob("*.py")]
    sources += [path.read_text(encoding="utf-8") for path in (ROOT / "tasks").rglob("*.py")]
    named = {
        name for text in sources for name in re.findall(r"(?:Completed|Failed|Cancelled)\(\s*name=\"(\w+)\"", text)
    }
    assert {"Stopped", "Skipped", "NothingWaits", "Empty"} <= named
    assert named - set(QUIET_STATES) == set()
    from flows.watch import decide

    outcomes = {decide("a", state)[0] for state in ({}, {"seen": "a"}, {"ingested": "a"})}
    assert outcomes == {"Settling", "Changed", "Unchanged"}
    assert outcomes <= set(QUIET_STATES)


def test_only_a_ring_of_prefect_runs_has_a_node_deployment():
    from flows import node

    assert "flows/node.py:node" not in [entry["entrypoint"] for entry in plan(parse_config(tiny_document()))]
    entry = plan(ring())[-1]
    assert entry["entrypoint"] == "flows/node.py:node"
    assert (entry["work_pool"]["name"], entry["work_pool"]["work_queue_name"]) == ("gpus", "nodes")
    assert DEPLOYED_TAG not in entry["tags"]  # the train flow replaces a node that crashes: no notification
    sent = {"node_rank": 1, "coordinator": "127.0.0.1:1", "key_file": "/k", "max_restarts": 3}
    assert node.node.validate_parameters(sent).items() >= sent.items()


@pytest.mark.parametrize("kind", KINDS)
def test_every_run_is_tagged_and_sends_heartbeats(kind):
    options = Options(WorkPool("here", kind, "" if kind == "process" else "registry.example.com/starling:1"))
    for entry in plan(ring(), options):
        assert entry["tags"][0] == TAG
        variables = entry["work_pool"]["job_variables"]
        assert variables["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_S)
        assert ("image" in variables) == (kind != "process")


def test_prefect_yaml_equals_the_output_of_deploy():
    printed = CliRunner().invoke(app, ["deploy", "--config", str(ROOT / "configs" / "demo.yaml"), "--print"])
    assert printed.exit_code == 0, printed.output
    assert (ROOT / "prefect.yaml").read_text(encoding="utf-8") == printed.output, (
        "run: starling deploy --print > prefect.yaml"
    )


def test_prefects_own_command_reads_the_yaml():
    from prefect.cli.deploy._models import PrefectYamlModel

    config = load_config(ROOT / "configs" / "demo.yaml")
    text = prefect_yaml([config], Options(WorkPool("k", "kubernetes", "i:1"), "Europe/Berlin", ("s3://b/in",)))
    model = PrefectYamlModel.model_validate(yaml.safe_load(text))
    assert [deployment.entrypoint for deployment in model.deployments] == [item.entrypoint for item in SCHEDULED]
    by_name = {deployment.entrypoint.partition(":")[2]: deployment for deployment in model.deployments}
    assert by_name["pipeline"].schedules[0].timezone == "Europe/Berlin"
    assert by_name["watch"].parameters["prefixes"] == ["s3://b/in"]
    assert by_name["ingest"].schedules == []
    assert model.deployments[0].work_pool.job_variables["image"] == "i:1"


def test_invalid_pool_options_name_the_valid_ones():
    with pytest.raises(PoolError, match="process, docker, kubernetes"):
        WorkPool(kind="slurm")
    with pytest.raises(PoolError, match="--pool-type docker"):
        WorkPool(image="x:1")


def test_malformed_notification_address_is_refused_without_repeating_it(home):
    done = CliRunner().invoke(app, ["deploy", "--notify-url", "hook-with-secret"])
    assert done.exit_code == 1
    assert "--notify-url" in done.stderr
    assert "hook-with-secret" not in done.output + done.stderr


def test_up_starts_workers_for_pipelines_and_each_node_pool(home, tmp_path, monkeypatch):
    from flows.cli.up import _workers
    from flows.servers import services

    commands = []
    monkeypatch.setattr(services, "spawn", lambda name, command, *_: commands.append(command) or name)

    def started(deployments, configs):
        commands.clear()
        return [start() for start in _workers(deployments, configs)]

    document = tiny_document()
    plain = write_config(tmp_path / "plain.yaml", document)
    document["train"] |= {"strategy": "adpsgd", "nodes": 2, "launch": {"kind": "prefect", "pool": "gpus"}}
    both = [plain, write_config(tmp_path / "ring.yaml", document)]
    assert started(["train/tiny"], [plain]) == ["worker"]
    assert commands[0][commands[0].index("--work-queue") + 1] == "default"
    assert commands[0][-2:] == ["--limit", "1"]
    assert started(["train/tiny", "node/tiny"], both) == ["worker", "worker-gpus-nodes"]
    words = commands[1]
    assert (words[words.index("--pool") + 1], words[words.index("--work-queue") + 1]) == ("gpus", "nodes")
    assert "--limit" not in words
