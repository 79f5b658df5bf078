"""The form of the deployed flow `search` in Prefect's UI, and what its server accepts of it."""

import copy

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import is_valid_schema, validate
from prefect.utilities.schema_tools.validation import ValidationError
from support import tiny_document

from flows.deploy.deployments import plan
from flows.search import search
from tasks.config.pipeline import parse_config
from tasks.search.methods import METHODS

SPACE = {
    "train.optimizer": ["adamw", {"kind": "sgd", "clip_norm": 1.0}],
    "train.optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True, "points": 3},
    "train.optimizer.momentum": {"choices": [0.9, 0.95], "when": {"train.optimizer": "sgd"}},
}


@pytest.fixture(scope="module")
def schema():
    return parameter_schema(search).model_dump_for_openapi()


def deployed(method="hyperband", space=SPACE):
    """The parameters of the deployment of a configuration with a search."""
    document = tiny_document()
    document["train"] |= {"epochs": 9}
    config = parse_config(document | {"search": {"method": method, "space": space}})
    (entry,) = [entry for entry in plan(config) if entry["entrypoint"].endswith(":search")]
    return copy.deepcopy(entry["parameters"])


def accepted(parameters, schema):
    """Whether Prefect's server begins a run with these parameters."""
    try:
        validate(parameters, schema, raise_on_error=True, preprocess=True)
    except ValidationError:
        return False
    return True


def parts(value):
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(part)


def test_the_form_has_only_what_prefects_ui_can_draw(schema):
    is_valid_schema(schema, preprocess=True)
    names = {part["$ref"] for part in parts(schema) if isinstance(part, dict) and "$ref" in part}
    assert {name.removeprefix("#/definitions/") for name in names} <= schema["definitions"].keys()
    assert not any("oneOf" in part or "discriminator" in part for part in parts(schema) if isinstance(part, dict))
    form = schema["definitions"]["SearchConfig"]
    assert all(field["description"] for field in form["properties"].values())
    assert form["required"] == ["space"]
    kinds = [schema["definitions"][way["$ref"].rsplit("/")[-1]] for way in form["properties"]["method"]["anyOf"]]
    assert [kind["properties"]["kind"]["const"] for kind in kinds] == list(METHODS)
    assert all(field["description"] for kind in kinds for field in kind["properties"].values())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.variants(3)
def test_the_deployed_search_is_accepted_with_every_method(schema, method):
    assert accepted(deployed(method), schema)


def test_what_a_user_changes_in_the_form_is_accepted_or_refused_as_by_the_command(schema):
    parameters = deployed()
    section = parameters["config"]["search"]
    section["space"]["train.max_batch"] = [16, 32]  # as in YAML
    section["space"]["model.dropout"] = {"low": 0, "high": 0.4}
    section["method"] = {"kind": "bohb", "eta": 4}
    assert accepted(parameters, schema)
    assert search.validate_parameters(parameters)["config"].search.space["train.max_batch"].choices == (16, 32)
    for change in ({"trials": -1}, {"method": {"kind": "annealing"}}, {"minimise": "loss"}, {"space": {"a": 3}}):
        assert not accepted(parameters | {"config": parameters["config"] | {"search": section | change}}, schema)
    assert accepted(parameters | {"config": parameters["config"] | {"search": None}}, schema)
