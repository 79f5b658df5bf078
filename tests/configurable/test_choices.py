"""Configurations of which one kind is chosen."""

import json
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ValidationError, create_model

from configurable.choices import Choice, OneOf
from speech.features.config import FeatureConfig
from speech.models.config import ModelConfig


class Sphere(Choice):
    kind: Literal["sphere"] = "sphere"
    radius: float = 1.0


class Box(Choice):
    kind: Literal["box"] = "box"
    width: float = 2.0
    depth: float = 3.0


KINDS = {"sphere": Sphere, "box": Box}


class Thing(BaseModel):
    shape: Annotated[Choice, OneOf(KINDS, "sphere")] = Sphere()
    name: str = ""


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("box", Box()),
        ("sphere", Sphere()),
        ({"kind": "box", "width": 5}, Box(width=5)),
        ({"radius": 4}, Sphere(radius=4)),  # of the default kind
        ({}, Sphere()),
        (Box(depth=1), Box(depth=1)),
    ],
)
def test_a_kind_is_chosen_by_name_by_mapping_or_by_default(given, chosen):
    assert Thing(shape=given).shape == chosen
    assert Thing.model_validate_json(json.dumps({"shape": Thing(shape=given).model_dump()["shape"]})).shape == chosen


@pytest.mark.parametrize(
    "given", ["cone", {"kind": "cone"}, {"kind": "sphere", "width": 1}, {"width": 1}, 3, {"kind": "box", "width": "w"}]
)
def test_other_kinds_and_the_fields_of_other_kinds_are_refused(given):
    with pytest.raises(ValidationError, match="shape"):
        Thing(shape=given)


def test_the_kind_stays_where_defaults_are_left_out():
    assert Thing(shape="box").model_dump(exclude_defaults=True) == {"shape": {"kind": "box"}}
    assert Thing(shape=Box(width=7)).model_dump(exclude_defaults=True) == {"shape": {"kind": "box", "width": 7.0}}
    assert Thing().model_dump(exclude_defaults=True) == {}
    assert Box().model_dump(exclude_defaults=True) == {"kind": "box"}


def test_a_form_shows_each_kind_with_a_description():
    schema = Thing.model_json_schema()
    assert [kind["$ref"] for kind in schema["properties"]["shape"]["anyOf"]] == ["#/$defs/Sphere", "#/$defs/Box"]
    assert all(kind["properties"]["kind"]["description"] for kind in schema["$defs"].values())


def test_a_later_kind_needs_no_change_of_the_field():
    later = create_model("Cone", __base__=Choice, kind=(Literal["cone"], "cone"), angle=(float, 30.0))
    thing = create_model("Later", shape=(Annotated[Choice, OneOf(KINDS | {"cone": later}, "sphere")], ...))
    assert thing(shape={"kind": "cone", "angle": 45}).shape.angle == 45.0


@pytest.mark.parametrize("base", [FeatureConfig, ModelConfig])
def test_a_kind_without_its_computation_cannot_be_configured(base):
    incomplete = type("Incomplete", (base,), {"__annotations__": {"kind": str}, "kind": "incomplete"})
    with pytest.raises(TypeError, match="abstract"):
        incomplete()


class Perhaps(BaseModel):
    shape: Annotated[Choice | None, OneOf(KINDS, "sphere", optional=True)] = None


def test_an_optional_choice_may_be_none():
    assert Perhaps().shape is None
    assert Perhaps(shape=None).model_dump() == {"shape": None}
    assert Perhaps(shape={}).shape == Sphere()
    assert Perhaps.model_validate_json(Perhaps(shape="box").model_dump_json()).shape == Box()
    kinds = Perhaps.model_json_schema()["properties"]["shape"]["anyOf"]
    assert [entry.get("$ref", entry.get("type")) for entry in kinds] == ["#/$defs/Sphere", "#/$defs/Box", "null"]
    with pytest.raises(ValidationError, match="shape"):
        Perhaps(shape="cone")
