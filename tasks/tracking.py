"""MLflow: the client, and the one run that a training and its registration share.

A training has an identity that is drawn when it begins and kept beside its checkpoints; its MLflow run carries it as
the tag `starling.training`. So a resumed training, or the registration of its model, finds the run again.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import mlflow
from mlflow.entities import Param, Run, RunTag
from mlflow.exceptions import MlflowException

from tasks.embedded_database import database_of, make_ready
from tasks.home import mlflow_artifacts, mlflow_uri, shown_mlflow_uri

KEY_TAG = "starling.key"
TRAINING_TAG = "starling.training"
DECISION_TAG = "starling.decision"
NOTE_TAG = "mlflow.note.content"
"""What MLflow shows as a run's description."""
_PARAMS_PER_CALL = 100
_VALUE_LENGTH = 6000


def client() -> mlflow.MlflowClient:
    """A client of the configured MLflow, without telemetry and without unpickling.

    Raises:
        EmbeddedDatabaseError: MLflow's database in the data folder cannot be used; the message says what to do.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # the terminal has the stages' own bars
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # links stand in artifacts and summaries
    uri = mlflow_uri()
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # what it logs there with a traceback, it raises, too
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if (database := database_of(uri)) is not None:
        make_ready(database)
    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(uri)  # by name: another thread may set another address in between


@contextmanager
def impatient(seconds: int, always: bool = False) -> Iterator[None]:
    """Let no request to MLflow take longer, nor be repeated, while the block runs.

    Args:
        seconds: How long one may take.
        always: Also over what the user has set.
    """
    wanted = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    changed = {name: os.environ.get(name) for name in wanted if always or name not in os.environ}
    os.environ.update({name: wanted[name] for name in changed})
    try:
        yield
    finally:
        for name, before in changed.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before


def experiment_id(api: mlflow.MlflowClient, name: str) -> str:
    """The experiment of that name, made if it is missing."""
    found = api.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    local = mlflow_uri().startswith("sqlite:") or not os.environ.get("MLFLOW_TRACKING_URI")
    location = (mlflow_artifacts() / name).as_uri() if local else None
    return str(api.create_experiment(name, artifact_location=location))


def ui_links(run: Run, name: str = "", version: str = "") -> dict[str, str]:
    """Addresses of MLflow's pages: of a run, and of a model's version; none where MLflow is no server.

    Args:
        run: The run.
        name: Registered model.
        version: Its version.
    """
    base = shown_mlflow_uri().rstrip("/")
    if not base.startswith(("http://", "https://")):
        return {}
    links = {"MLflow run": f"{base}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"}
    if name and version:
        links["model version"] = f"{base}/#/models/{quote(name)}/versions/{version}"
    return links


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested configuration as dotted parameters, lists as JSON."""
    flat: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            flat |= flatten(item, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.dumps(item) if isinstance(item, list) else str(item)
    return flat


@dataclass(frozen=True)
class TrainingRun:
    """What the MLflow run of a training says about it."""

    training: str
    """Identity of the training."""
    experiment: str
    """Experiment's name."""
    name: str
    """Run's name."""
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    """Only what cannot change when the training is resumed: MLflow lets no parameter change."""


def open_training_run(api: mlflow.MlflowClient, about: TrainingRun, known: str = "") -> Run:
    """The MLflow run of a training, made if it is missing, and running again.

    Args:
        api: A client.
        about: The training.
        known: The run's id, if it has been told before.
    """
    run = (_run_of(api, about.training, known) if known else None) or find_training_run(api, about)
    if run is None:
        tags = {TRAINING_TAG: about.training, **about.tags}
        run = api.create_run(experiment_id(api, about.experiment), run_name=about.name, tags=tags)
    elif run.info.status != "RUNNING":
        api.update_run(run.info.run_id, status="RUNNING")
    log_params(api, run, about.params)
    return run


def find_training_run(api: mlflow.MlflowClient, about: TrainingRun) -> Run | None:
    """The run that carries a training's identity, if this MLflow has it."""
    found = api.get_experiment_by_name(about.experiment)
    if found is None:
        return None
    runs = api.search_runs([found.experiment_id], f"tags.`{TRAINING_TAG}` = '{about.training}'", max_results=1)
    return runs[0] if runs else None


def _run_of(api: mlflow.MlflowClient, training: str, run_id: str) -> Run | None:
    try:
        run = api.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    # another MLflow, or one with a new database, may have another run under this id
    same = run.data.tags.get(TRAINING_TAG) == training and run.info.lifecycle_stage == "active"
    return run if same else None


def log_params(api: mlflow.MlflowClient, run: Run, params: Mapping[str, str]) -> None:
    """Log parameters that the run does not have yet."""
    new = [Param(name, value[:_VALUE_LENGTH]) for name, value in params.items() if name not in run.data.params]
    for start in range(0, len(new), _PARAMS_PER_CALL):
        api.log_batch(run.info.run_id, params=new[start : start + _PARAMS_PER_CALL])


def set_tags(api: mlflow.MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    """Set several tags at once."""
    api.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
