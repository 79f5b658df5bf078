"""Methods of search by kind; a new one is one file with its configuration, and one line in `METHODS`."""

from typing import Annotated

from configurable.choices import OneOf
from tasks.search.methods.asha import AshaConfig
from tasks.search.methods.base import MethodConfig
from tasks.search.methods.bohb import BohbConfig
from tasks.search.methods.grid import GridConfig
from tasks.search.methods.hyperband import HyperbandConfig
from tasks.search.methods.random import RandomConfig
from tasks.search.methods.tpe import TpeConfig

__all__ = ["METHODS", "MethodChoice", "MethodConfig"]

METHODS: dict[str, type[MethodConfig]] = {
    "random": RandomConfig,
    "grid": GridConfig,
    "tpe": TpeConfig,
    "hyperband": HyperbandConfig,
    "asha": AshaConfig,
    "bohb": BohbConfig,
}
MethodChoice = Annotated[MethodConfig, OneOf(METHODS, "random")]
"""A field that takes the configuration of any method."""
