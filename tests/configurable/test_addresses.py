"""What an address holds of a configuration."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, create_model

from configurable.addresses import address_content
from configurable.choices import Choice, OneOf


class Sphere(Choice):
    kind: Literal["sphere"] = "sphere"
    radius: float = 3.0


class Box(Choice):
    kind: Literal["box"] = "box"
    width: float = 1.0


KINDS = {"sphere": Sphere, "box": Box}
Shape = Annotated[Sphere | Box, OneOf(KINDS, "sphere")]


class Part(BaseModel):
    size: int = 1
    threads: int = 1


class Whole(BaseModel):
    name: str
    shape: Shape = Sphere(radius=5)
    other: Annotated[Sphere | Box | None, OneOf(KINDS, "box", optional=True)] = None
    part: Part = Part(size=2)
    parts: tuple[Part, ...] = ()
    by_name: dict[str, Part] = Field(default_factory=dict)
    rate: float = 8


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ({}, {}),
        ({"rate": 8.0, "shape": {"kind": "sphere", "radius": 5}, "part": {"size": 2}}, {}),
        ({"shape": "sphere"}, {"shape": {"kind": "sphere"}}),  # with another radius than the field's default
        ({"shape": "box"}, {"shape": {"kind": "box"}}),
        ({"shape": {"kind": "box", "width": 2}}, {"shape": {"kind": "box", "width": 2.0}}),
        ({"other": "box"}, {"other": {"kind": "box"}}),
        ({"other": "sphere"}, {"other": {"kind": "sphere"}}),
        ({"part": {}}, {"part": {}}),  # the class's size
        ({"part": {"size": 3}}, {"part": {"size": 3}}),
        ({"parts": [{}]}, {"parts": [{}]}),
        ({"parts": [{}, {"size": 4}]}, {"parts": [{}, {"size": 4}]}),
        ({"by_name": {"a": {}}}, {"by_name": {"a": {}}}),
    ],
)
def test_fields_with_the_fields_default_are_left_out(given, content):
    assert address_content(Whole(name="n", **given)) == {"name": "n"} | content


class Ball(Choice):
    """Its kind is narrowed by subclasses, as that of strategies."""

    kind: Literal["ball", "football"] = "ball"


def test_a_choice_keeps_its_kind():
    assert address_content(Sphere()) == {"kind": "sphere"}
    assert address_content(Box()) == {"kind": "box"}
    assert address_content(Ball()) == {"kind": "ball"}


def test_a_union_told_apart_by_a_literal_needs_no_choice():
    def model_of(kind):
        return create_model(kind, kind=(Literal[kind], kind), size=(int, 1))

    first, second = model_of("first"), model_of("second")
    field = Annotated[first | second, Field(discriminator="kind")]
    model = create_model("Union", value=(field, first(size=2)))
    contents = [address_content(model(value=value)) for value in (first(size=2), first(), second(), second(size=2))]
    assert contents == [
        {},
        {"value": {"kind": "first"}},
        {"value": {"kind": "second"}},
        {"value": {"kind": "second", "size": 2}},
    ]


def test_fields_that_do_not_affect_the_output_are_left_out_at_any_depth():
    given = Whole(name="n", part=Part(size=3, threads=7), parts=[Part(threads=9)], by_name={"a": Part(threads=2)})
    content = address_content(given, without=("name", "part.threads", "parts.threads", "by_name.threads"))
    assert content == {"part": {"size": 3}, "parts": [{}], "by_name": {"a": {}}}
    assert address_content(Whole(name="n", part=Part(size=2, threads=7)), without=("part.threads",)) == {"name": "n"}
    assert address_content(given, only=("name", "rate")) == {"name": "n"}


def test_a_later_field_changes_nothing_until_it_is_used():
    later = create_model("Later", __base__=Part, added=(int, 7))
    whole = create_model("LaterWhole", __base__=Whole, part=(later, later(size=2)), parts=(tuple[later, ...], ()))
    for given in ({}, {"part": {}}, {"part": {"size": 5}}, {"parts": [{"size": 2}]}):
        assert address_content(whole(name="n", **given)) == address_content(Whole(name="n", **given))
    assert address_content(whole(name="n", part={"size": 2, "added": 8})) == {
        "name": "n",
        "part": {"size": 2, "added": 8},
    }
