"""Fetches the bundles of registered models."""

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
    client()
    try:
        local = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=folder and str(folder)))
    except (MlflowException, OSError) as error:
        raise ValueError(
            f"{uri} is not in the registry at {shown_mlflow_uri()}: run a pipeline first (`starling run demo`), "
            f"or set STARLING_HOME or MLFLOW_TRACKING_URI to where it is ({error})"
        ) from error
    return next(local.rglob("bundle.json")).parent
