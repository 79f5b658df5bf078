"""Fields of a configuration that have become constants.

Bundles of registered models and deployments name every field of a configuration with its value, so they are still read
if they name a former field with the value that it always has now. Another value is a mistake:

    class HmmConfig(BaseModel):
        _power = former_fields(power=0.25)
"""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator


def former_fields(instead: str = "", /, **constants: Any) -> Any:
    """A validator of a configuration class some of whose fields have become constants.

    Args:
        instead: What to write in their place; by default, that there is nothing.
        constants: The value of each former field, as JSON has it.
    """

    def without_former(document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        for name, constant in constants.items():
            given = document.get(name, constant)
            if (list(given) if isinstance(given, tuple) else given) != constant:
                raise ValueError(f"{name} is no longer a field: {instead or f'it is always {constant}; remove it'}")
        return {name: value for name, value in document.items() if name not in constants}

    return model_validator(mode="before")(without_former)
