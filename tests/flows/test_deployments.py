import json
from datetime import UTC, datetime, timedelta

import pytest
from prefect.client.schemas.schedules import CronSchedule
from prefect.utilities.callables import parameter_schema
from support import tiny_document

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


@pytest.mark.parametrize("name", [item.flow for item in SCHEDULED])
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
