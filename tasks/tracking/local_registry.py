"""Finds the files of a registered model on this machine without MLflow, whose import takes two seconds of CPU."""

import json
import os
import re
import sqlite3
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from tasks.config.home import mlflow_uri
from tasks.tracking.embedded_database import database_of

_URI = re.compile(r"models:/(?P<name>[^@/]+)(@(?P<alias>[^@/]+)|/(?P<version>[0-9]+))")
_OF_ALIAS = "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = ? AND workspace = 'default'"
_LOCATION = """
    SELECT storage_location FROM model_versions
    WHERE name = ? AND version = ? AND workspace = 'default' AND current_stage <> 'Deleted_Internal'
"""
_SIGN_IN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_PATIENCE_S = 5.0


def registered_bundle(uri: str) -> Path | None:
    """Folder of a registered model's bundle, if it is on this machine.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Returns:
        The folder; None if the registry has no such version, has its files elsewhere, or does not answer as expected:
        MLflow may find it nevertheless, and otherwise says what is wrong.
    """
    match, registry = _URI.fullmatch(uri), mlflow_uri()
    if match is None:
        return None
    alias, version, database = match["alias"] or "", match["version"] or "", database_of(registry)
    with suppress(OSError, ValueError, KeyError, TypeError, sqlite3.Error):
        if database is not None:
            found = _from_database(database, match["name"], alias, version)
        elif registry.startswith(("http://", "https://")) and not any(map(os.environ.get, _SIGN_IN)):
            found = _from_server(registry, match["name"], alias, version)
        else:
            return None
        location = urlsplit(found)
        return bundle_in(Path(urllib.request.url2pathname(location.path))) if location.scheme == "file" else None
    return None


def bundle_in(folder: Path) -> Path | None:
    """The folder of the bundle among a model's files; None if Starling has not made them."""
    return next((path.parent for path in folder.rglob("bundle.json")), None)


def _from_database(database: Path, name: str, alias: str, version: str) -> str:
    """Where the embedded database has a version's files."""
    with closing(sqlite3.connect(f"file:{quote(str(database.absolute()))}?mode=ro", uri=True)) as opened:
        if alias:
            (version,) = opened.execute(_OF_ALIAS, (name, alias)).fetchone()
        (location,) = opened.execute(_LOCATION, (name, version)).fetchone()
    return str(location)


def _from_server(registry: str, name: str, alias: str, version: str) -> str:
    """Where an MLflow server has a version's files, by its REST API."""

    def answer(method: str, **values: str) -> dict[str, Any]:
        url = f"{registry.rstrip('/')}/api/2.0/mlflow/{method}?{urlencode(values)}"
        with urllib.request.urlopen(url, timeout=_PATIENCE_S) as reply:  # noqa: S310 - the scheme is checked
            parsed: dict[str, Any] = json.load(reply)
        return parsed

    if alias:
        version = answer("registered-models/alias", name=name, alias=alias)["model_version"]["version"]
    return str(answer("model-versions/get-download-uri", name=name, version=version)["artifact_uri"])
