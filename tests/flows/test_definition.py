"""A flow describes its parameters when it is asked to, and not while its module is imported."""

import inspect

import pytest
from prefect import Flow
from prefect.exceptions import ParameterTypeError
from pydantic import BaseModel

from flows.definition import flow


def test_parameters_are_described_when_asked_for():
    described = []

    class Settings(BaseModel):
        rate: int = 8000

        @classmethod
        def __get_pydantic_json_schema__(cls, schema, handler):
            described.append(cls)
            return handler(schema)

    def resample(settings: Settings, quick: bool = False) -> int:
        """Resample.

        Args:
            settings: With the rate.
            quick: Linearly.
        """
        return settings.rate

    made = flow(name="resample-all", persist_result=False)(resample)
    assert not described
    assert isinstance(made, Flow)
    assert (made.name, made.persist_result, made.fn) == ("resample-all", False, resample)
    assert inspect.signature(made) == inspect.signature(resample)
    assert list(inspect.signature(resample).parameters) == ["settings", "quick"]
    form = made.parameters
    assert described
    assert form.required == ["settings"]
    assert form.properties["quick"]["description"] == "Linearly."
    assert form.definitions["Settings"]["properties"]["rate"]["default"] == 8000
    assert made.validate_parameters({"settings": {"rate": "16000"}})["settings"] == Settings(rate=16000)
    with pytest.raises(ParameterTypeError):
        made.validate_parameters({"settings": {"rate": "fast"}})
