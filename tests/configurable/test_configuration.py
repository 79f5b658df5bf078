"""Configurations are built when they are used, and described by the docstrings of their fields."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from configurable.choices import Choice, OneOf
from configurable.configuration import Configuration, descriptions


class Base(Configuration):
    size: int = Field(default=1, alias="width")
    """How large
    it is."""
    name: str = ""
    """Its name."""
    other: int = 0

    class Inner(Configuration):
        depth: int = 2
        """How deep it is."""


class Derived(Base):
    name: str = "derived"
    size: int = Field(default=2, alias="width")
    """Another size."""


def test_docstrings_describe_the_fields_of_a_class():
    assert descriptions(Base) == {"size": "How large\nit is.", "name": "Its name."}
    assert descriptions(Base.Inner) == {"depth": "How deep it is."}


def test_a_field_without_docstring_has_that_of_the_class_it_overrides():
    assert descriptions(Derived) == {"size": "Another size.", "name": "Its name."}


def test_a_class_within_a_function_has_its_own_docstrings():
    class Derived(Configuration):
        name: str = ""
        """A local name."""

    assert descriptions(Derived) == {"name": "A local name."}


def test_forms_show_descriptions_under_the_names_that_documents_use():
    properties = Derived.model_json_schema()["properties"]
    assert {name: about.get("description") for name, about in properties.items()} == {
        "width": "Another size.",
        "name": "Its name.",
        "other": None,
    }


def test_a_form_describes_the_kind_of_a_choice():
    class Round(Choice):
        kind: Literal["round"] = "round"

    class Whole(Configuration):
        shape: Annotated[Choice, OneOf({"round": Round}, "round")] = Round()

    described = Whole.model_json_schema()["$defs"]["Round"]["properties"]["kind"]
    assert described["description"] == "Which component it is."


def test_a_configuration_is_built_when_it_is_first_used():
    class Late(Configuration):
        share: float = Field(default=0.5, gt=0)

    assert not Late.__pydantic_complete__
    assert Late(share=0.25).share == 0.25
    assert Late.__pydantic_complete__
    for mistake in ({"share": 0}, {"share": float("inf")}, {"shares": 1}):
        with pytest.raises(ValidationError):
            Late(**mistake)
    with pytest.raises(ValidationError):
        Late().share = 1.0
