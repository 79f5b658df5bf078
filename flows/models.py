"""Finds a model by any of its names: a registered model, its version or alias, a URI, or a bundle's folder."""

import re
from pathlib import Path

SPEC = "bundle.json"  # as in recognition.bundle, whose import takes a second
_REGISTERED = re.compile(r"(?P<name>[^@/\s]+)(?:@(?P<alias>[^@/\s]+)|/(?P<version>\d+))?")


def model_uri(model: str) -> str:
    """The URI of a registered model, or the path of a bundle's folder.

    Args:
        model: `NAME` (its champion), `NAME@ALIAS`, `NAME/VERSION`, `models:/…`, or a folder. A folder comes before
            a model of the same name only if it holds a bundle: a model may be named after the folder of its recordings.

    Raises:
        ValueError: If it is none of these.
    """
    match = _REGISTERED.fullmatch(model)
    if model.startswith("models:/") or (Path(model).is_dir() and (match is None or (Path(model) / SPEC).exists())):
        return model
    if match is None:
        raise ValueError(
            f"{model!r} is neither a folder nor the name of a model: give NAME, NAME@ALIAS, NAME/VERSION, models:/… "
            "or a bundle's folder"
        )
    if match["version"]:
        return f"models:/{match['name']}/{match['version']}"
    return f"models:/{match['name']}@{match['alias'] or 'champion'}"


def fetch_model(model: str, option: str = "") -> Path:
    """Local folder of a model's bundle; fetched from the registry for a models:/ URI.

    Args:
        model: `models:/…` or a folder.
        option: The option of the command that names the model, for messages.

    Raises:
        ValueError: If the registry has no such model.
    """
    if not model.startswith("models:/"):
        return Path(model)
    from flows.servers.services import connect_mlflow
    from tasks.tracking.fetching import download_bundle

    connect_mlflow()
    return download_bundle(model, option=option)
