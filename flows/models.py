"""Finds a model by any of its names: a registered model, its version or alias, a URI, or a bundle's folder."""

import re
from pathlib import Path

_REGISTERED = re.compile(r"(?P<name>[^@/\s]+)(?:@(?P<alias>[^@/\s]+)|/(?P<version>\d+))?")


def model_uri(model: str) -> str:
    """The URI of a registered model, or the path of a bundle's folder.

    Args:
        model: `NAME` (its champion), `NAME@ALIAS`, `NAME/VERSION`, `models:/…`, or a folder, which comes first.

    Raises:
        ValueError: If it is none of these.
    """
    if model.startswith("models:/") or Path(model).is_dir():
        return model
    match = _REGISTERED.fullmatch(model)
    if match is None:
        raise ValueError(f"{model!r} is no model: give NAME, NAME@ALIAS, NAME/VERSION, models:/… or a bundle's folder")
    if match["version"]:
        return f"models:/{match['name']}/{match['version']}"
    return f"models:/{match['name']}@{match['alias'] or 'champion'}"


def fetch_model(model: str) -> Path:
    """Local folder of a model's bundle; fetched from the registry for a models:/ URI.

    Raises:
        ValueError: If the registry has no such model.
    """
    if not model.startswith("models:/"):
        return Path(model)
    from flows.servers.services import connect_mlflow
    from tasks.tracking.fetching import download_bundle

    connect_mlflow()
    return download_bundle(model)
