import json
from datetime import UTC, datetime, timedelta

import pytest
from prefect.client.schemas.schedules import CronSchedule
from prefect.utilities.callables import parameter_schema
from support import tiny_document, write_config

from flows import pipeline
from flows.deployments import SCHEDULED
from tasks.config import parse_config


def test_the_pipeline_runs_nightly_and_the_evaluation_hourly():
    schedules = {item.flow: item.cron for item in SCHEDULED}
    minute, hour, *rest = schedules["pipeline"].split()
    assert (minute.isdigit(), hour.isdigit(), rest) == (True, True, ["*"] * 3)
    minute, *rest = schedules["evaluate"].split()
    assert (minute.isdigit(), rest) == (True, ["*"] * 4)
    assert all(CronSchedule(cron=cron, timezone="UTC") for cron in schedules.values() if cron)
    assert all(item.about.endswith(".") for item in SCHEDULED)


@pytest.mark.parametrize("name", [item.flow for item in SCHEDULED if item.module == "pipeline"])
def test_every_deployment_is_a_flow_that_takes_a_configuration(name):
    flow = getattr(pipeline, name)
    assert flow.name == name
    config = parse_config(tiny_document(register={"model": "other"}))
    sent = json.loads(json.dumps({"config": config.model_dump(mode="json", by_alias=True)}))
    assert flow.validate_parameters(sent)["config"] == config


def test_the_parameter_form_shows_the_configurations_fields_with_their_descriptions():
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
    assert schema["properties"]["force_from"]["description"].startswith("Do the stages from this one on anew")


def test_run_names_are_unique_and_sort_by_time():
    config = parse_config(tiny_document())
    names = {pipeline.new_run_id(config) for _ in range(50)}
    assert len(names) == 50
    stamp = datetime.strptime(min(names).rsplit("-", 1)[0], "tiny-%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - stamp) < timedelta(minutes=2)


def test_a_ring_of_prefect_runs_has_a_deployment_for_its_nodes_and_no_other_configuration_has(monkeypatch):
    from flows import deployments, node

    made, pools = [], []

    class Loaded:
        def __init__(self, entrypoint):
            self.entrypoint = entrypoint

        def deploy(self, **options):
            made.append((self.entrypoint, options))
            return "id"

    monkeypatch.setattr("prefect.flows.Flow.from_source", lambda source, entrypoint: Loaded(entrypoint))
    monkeypatch.setattr(deployments, "_make_pool", lambda *given: pools.append(given))
    document = tiny_document()
    deployed = deployments.deploy(parse_config(document))
    assert [entry["deployment"] for entry in deployed] == [f"{item.flow}/tiny" for item in SCHEDULED]
    document["train"] |= {"strategy": "adpsgd", "nodes": 2, "launch": {"kind": "prefect", "pool": "gpus"}}
    made.clear()
    assert deployments.deploy(parse_config(document))[-1]["deployment"] == "node/tiny"
    entrypoint, options = made[-1]
    assert entrypoint == "flows/node.py:node"
    assert (options["work_pool_name"], options["work_queue_name"]) == ("gpus", "nodes")
    assert pools == [("starling",), ("starling",), ("gpus", "nodes")]
    sent = {"node_rank": 1, "store": "127.0.0.1:1", "key_file": "/k", "max_restarts": 3}
    assert node.node.validate_parameters(sent).items() >= sent.items()


def test_up_starts_a_worker_for_pipelines_and_one_for_the_nodes_of_each_pool(home, tmp_path, monkeypatch):
    from flows import services
    from flows.cli.serve import _start_workers

    commands = []
    monkeypatch.setattr(services, "spawn", lambda name, command, *_: commands.append(command) or name)
    document = tiny_document()
    plain = write_config(tmp_path / "plain.yaml", document)
    document["train"] |= {"strategy": "adpsgd", "nodes": 2, "launch": {"kind": "prefect", "pool": "gpus"}}
    ring = write_config(tmp_path / "ring.yaml", document)
    assert _start_workers(["train/tiny"], [plain]) == ["worker"]
    assert commands[0][commands[0].index("--work-queue") + 1] == "default"
    assert commands[0][-2:] == ["--limit", "1"]
    commands.clear()
    assert _start_workers(["train/tiny", "node/tiny"], [plain, ring]) == ["worker", "worker-gpus-nodes"]
    words = commands[1]
    assert (words[words.index("--pool") + 1], words[words.index("--work-queue") + 1]) == ("gpus", "nodes")
    assert "--limit" not in words
