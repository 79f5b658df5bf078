"""Defines flows: Prefect's decorator, without the forms of their parameters, which commands and runs do not need."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.utilities.callables import ParameterSchema, parameter_schema

P = ParamSpec("P")
R = TypeVar("R")


class QuickFlow(Flow[P, R]):
    """A flow that describes its parameters when it is asked to.

    Prefect computes the JSON schema of all parameters as soon as a flow is defined, which takes 0.7 s of CPU for each
    flow with a pipeline's configuration.
    """

    def __init__(self, fn: Callable[P, R], **options: Any) -> None:
        vars(fn)["__signature__"] = inspect.Signature()  # what Prefect is to describe now
        super().__init__(fn, **options)
        del vars(fn)["__signature__"], vars(self)["__signature__"]

    @property
    def parameters(self) -> ParameterSchema:
        """The form of a run's parameters in Prefect's UI."""
        return parameter_schema(self.fn)

    @parameters.setter
    def parameters(self, value: ParameterSchema) -> None:
        """Ignored: Prefect sets what it has found without a signature."""


def flow(**options: Any) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Decorate a function: it is a flow with these options, which are those of Prefect's decorator."""
    return lambda function: QuickFlow(function, **options)
