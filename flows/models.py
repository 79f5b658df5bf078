"""Finds a model by any of its names: a registered model, its version or alias, a URI, or a bundle's folder."""

from pathlib import Path

from tasks.config.model_names import registered_uri

SPEC = "bundle.json"  # as in recognition.bundle, whose import takes a second


def model_uri(model: str) -> str:
    """The URI of a registered model, or the path of a bundle's folder.

    Args:
        model: `NAME` (its champion), `NAME@ALIAS`, `NAME/VERSION`, `models:/…`, or a folder. A folder comes before
            a model of the same name only if it holds a bundle: a model may be named after the folder of its recordings.

    Raises:
        ValueError: If it is none of these.
    """
    uri = registered_uri(model) or registered_uri(f"{model}@champion")
    if model.startswith("models:/") or (Path(model).is_dir() and (not uri or (Path(model) / SPEC).exists())):
        return model
    if not uri:
        raise ValueError(
            f"{model!r} is neither a folder nor the name of a model: give NAME, NAME@ALIAS, NAME/VERSION, models:/… "
            "or a bundle's folder"
        )
    return uri


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
    from tasks.tracking.local_registry import registered_bundle

    connect_mlflow()
    if (bundle := registered_bundle(model)) is not None:
        return bundle
    from tasks.tracking.fetching import download_bundle  # imports MLflow

    return download_bundle(model, option=option)
