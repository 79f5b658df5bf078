"""Fetches the bundles of registered models."""

from contextlib import suppress
from pathlib import Path

import mlflow
from mlflow.exceptions import MlflowException

from tasks.config.home import shown_mlflow_uri
from tasks.tracking.runs import client


def download_bundle(uri: str, folder: Path | None = None, option: str = "") -> Path:
    """Local folder of a registered model's bundle.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        folder: Where it is copied to; by default MLflow's cache.
        option: The option of a command that names the model, for the remedy.

    Raises:
        ValueError: If the registry has no such model.
    """
    api = client()
    try:
        local = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=folder and str(folder)))
    except (MlflowException, OSError) as error:
        raise ValueError(
            f"{uri} is not in the registry at {shown_mlflow_uri()}: {_remedy(_names(api), option)}, "
            f"or set STARLING_HOME or MLFLOW_TRACKING_URI to where it is ({error})"
        ) from error
    return next(local.rglob("bundle.json")).parent


def _remedy(known: list[str], option: str) -> str:
    if not known:
        return "run a pipeline first (`starling run demo`)"
    give = f"{option} {known[0]}".strip()
    if len(known) == 1:
        return f"it has the model {known[0]!r}: give {give}"
    return f"it has the models {', '.join(map(repr, known))}: give one of them, such as {give}"


def _names(api: mlflow.MlflowClient) -> list[str]:
    """Some of the registered models; none if the registry does not answer."""
    with suppress(MlflowException, OSError):
        return [model.name for model in api.search_registered_models(max_results=10)]
    return []
