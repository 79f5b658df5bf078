"""Fetches the bundles of registered models."""

import atexit
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import mlflow
from mlflow.exceptions import MlflowException

from tasks.config.home import shown_mlflow_uri
from tasks.tracking.known_models import model_names, names_text, versions_of, versions_text
from tasks.tracking.local_registry import bundle_in
from tasks.tracking.runs import client


def download_bundle(uri: str, folder: Path | None = None, option: str = "") -> Path:
    """Local folder of a registered model's bundle.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        folder: Where it is copied to. By default, a model on this machine is used where it is, and others are copied to
            a temporary folder, which is removed when the process ends.
        option: The option of a command that names the model, for the remedy.

    Raises:
        ValueError: If the registry has no such model, or the model's files cannot be read, or are not Starling's.
    """
    api = client()
    temporary = Path(tempfile.gettempdir())
    before = set(temporary.iterdir())
    try:
        local = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=folder and str(folder)))
    except (MlflowException, OSError) as error:
        if location := _location(api, uri):
            raise ValueError(
                f"{uri} is in the registry at {shown_mlflow_uri()}, but its files at {location} cannot be read: "
                f"make them readable, or give another version ({error})"
            ) from error
        raise ValueError(
            f"{uri} is not in the registry at {shown_mlflow_uri()}: {_missing(api, uri, option)}, "
            f"or set STARLING_HOME or MLFLOW_TRACKING_URI to where it is ({error})"
        ) from error
    if folder is None:
        _remove_at_exit(local, temporary, before)
    bundle = bundle_in(local)
    if bundle is None:
        raise ValueError(f"{uri} was not made by Starling: it has no bundle.json. Give another model")
    return bundle


def _remove_at_exit(local: Path, temporary: Path, before: set[Path]) -> None:
    """Remove what MLflow downloaded when the process ends: MLflow itself never does.

    Args:
        local: What MLflow gave.
        temporary: The folder of temporary files.
        before: What was in it before the download; a registry on this machine may lie there, too, and must stay.
    """
    for folder in (local, *local.parents):
        if folder.parent == temporary and folder not in before:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _location(api: mlflow.MlflowClient, uri: str) -> str:
    """Where a version's files should be; empty if the registry does not have it, or does not answer."""
    name, _, version = uri.removeprefix("models:/").partition("/")
    name, _, alias = name.partition("@")
    with suppress(MlflowException, OSError):
        if alias:
            version = api.get_model_version_by_alias(name, alias).version
        return str(api.get_model_version_download_uri(name, version))
    return ""


def _missing(api: mlflow.MlflowClient, uri: str, option: str) -> str:
    """What the registry has instead of a model, or of an alias or version of one; as far as it answers."""
    names: list[str] = []
    name = re.split("[@/]", uri.removeprefix("models:/"))[0]
    with suppress(MlflowException, OSError):
        names = model_names(api)
        if name in names:
            return f"{name!r} has the versions {versions_text(versions_of(api, name))}: give one of these or its alias"
    return _remedy(names, option)


def _remedy(known: list[str], option: str) -> str:
    if not known:
        return "run a pipeline first (`starling run demo`)"
    give = f"{option} {known[0]}".strip()
    if len(known) == 1:
        return f"it has the model {known[0]!r}: give {give}"
    return f"it has the models {names_text([repr(name) for name in known])}: give one of them, such as {give}"
