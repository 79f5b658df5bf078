"""Finds a model by any of its names: a registered model, its version or alias, a URI, or a bundle's folder."""

import re
from pathlib import Path

from tasks.config.home import shown_mlflow_uri

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
    import mlflow
    from mlflow.exceptions import MlflowException

    from flows.servers.services import connect_mlflow
    from tasks.tracking.runs import client

    connect_mlflow()
    client()
    try:
        local = Path(mlflow.artifacts.download_artifacts(artifact_uri=model))
    except (MlflowException, OSError) as error:
        raise ValueError(
            f"{model} is not in the registry at {shown_mlflow_uri()}: run a pipeline first (`starling run demo`), "
            f"or set STARLING_HOME or MLFLOW_TRACKING_URI to where it is ({error})"
        ) from error
    return next(local.rglob("bundle.json")).parent
