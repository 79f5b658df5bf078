"""What the model registry has, for messages about what it does not have."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlflow
from mlflow.entities.model_registry import ModelVersion, RegisteredModel

_SHOWN = 10
"""Maximum number of names or versions in a message."""


def all_pages(search: Callable[..., Any]) -> Iterator[Any]:
    """What one of MLflow's searches, which takes `page_token`, finds on all pages."""
    token = None
    while True:
        page = search(page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def registered_models(api: mlflow.MlflowClient) -> Iterator[RegisteredModel]:
    """All registered models, sorted by name."""
    return all_pages(api.search_registered_models)


def named(name: str) -> str | None:
    """MLflow's filter for a name of any characters; None for a name with quotation marks of both kinds."""
    quote = next((mark for mark in ("'", '"') if mark not in name), None)
    return quote and f"name = {quote}{name}{quote}"


def versions_named(api: mlflow.MlflowClient, name: str) -> list[ModelVersion]:
    """All versions of a registered model, newest first."""
    found = all_pages(partial(api.search_model_versions, named(name)))
    return sorted((version for version in found if version.name == name), key=lambda version: -int(version.version))


def model_names(api: mlflow.MlflowClient) -> list[str]:
    """Names of all registered models."""
    return [model.name for model in registered_models(api)]


def names_text(names: list[str]) -> str:
    """The names for a message, shortened."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "") if names else "none"


def unknown_model(name: str, known: list[str]) -> str:
    """The message that the registry has no such model."""
    return f"the registry has no model {name!r}; it has: {names_text(known)}"


def versions_of(api: mlflow.MlflowClient, name: str) -> dict[str, list[str]]:
    """Aliases of each version of a model, newest first; an alias is written as `@champion`."""
    aliases = api.get_registered_model(name).aliases
    numbers = [int(version.version) for version in versions_named(api, name)]
    return {
        str(number): sorted(f"@{alias}" for alias, version in aliases.items() if int(version) == number)
        for number in numbers
    }


def versions_text(versions: dict[str, list[str]]) -> str:
    """Versions for a message, those with aliases first, such as `7 (@challenger), 5 (@champion), 6`."""
    ordered = sorted(versions, key=lambda number: not versions[number])
    return names_text([f"{model} ({', '.join(versions[model])})" if versions[model] else model for model in ordered])
