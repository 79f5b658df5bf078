"""Fetches the bundles of registered models."""

from contextlib import suppress
from pathlib import Path

import mlflow
from mlflow.exceptions import MlflowException

from tasks.config.home import shown_mlflow_uri
from tasks.tracking.runs import client


def download_bundle(uri: str, folder: Path | None = None) -> Path:
    """Local folder of a registered model's bundle.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        folder: Where it is copied to; by default MLflow's cache.

    Raises:
        ValueError: If the registry has no such model.
    """
    api = client()
    try:
        local = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=folder and str(folder)))
    except (MlflowException, OSError) as error:
        known = _names(api)
        remedy = (
            f"it has {', '.join(known)}: name one of these" if known else "run a pipeline first (`starling run demo`)"
        )
        raise ValueError(
            f"{uri} is not in the registry at {shown_mlflow_uri()}: {remedy}, "
            f"or set STARLING_HOME or MLFLOW_TRACKING_URI to where it is ({error})"
        ) from error
    return next(local.rglob("bundle.json")).parent


def _names(api: mlflow.MlflowClient) -> list[str]:
    """Some of the registered models; none if the registry does not answer."""
    with suppress(MlflowException, OSError):
        return [model.name for model in api.search_registered_models(max_results=10)]
    return []
