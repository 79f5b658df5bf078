"""The MLflow client, and the run that a training shares with the registration of its model.

A training has a random identity, which is stored beside its checkpoints and in the tag `starling.training` of its
MLflow run. So a resumed training, and the registration of its model, find the run again.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote

import mlflow
from mlflow.entities import DatasetInput, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from tasks.config.home import mlflow_artifacts, mlflow_uri, shown_mlflow_uri
from tasks.locking.lock_owner import LockOwner
from tasks.tracking.embedded_database import database_of, make_ready
from tasks.tracking.metrics import VALID_WER

KEY_TAG = "starling.key"
TRAINING_TAG = "starling.training"
DECISION_TAG = "starling.decision"
OWNER_TAG = "starling.owner"
"""Tag with the process that writes to a run, as JSON."""
ENDED_TAG = "starling.ended"
"""Tag with the reason why a run was stopped, or ended by another process than its own."""
STOPPED = "stopped"
"""First word of that reason if the run was stopped from outside."""
NOTE_TAG = "mlflow.note.content"
"""Tag that MLflow shows as a run's description."""
_TRAINING_VIEW = "?workflowType=machine_learning"
"""MLflow's pages show what belongs to training, and not what belongs to traces, which is the default of a browser."""
REPORT_FILE = "report.html"
"""The report's name among the artifacts of its run."""
_KIND_TAG = "mlflow.experimentKind"
_KIND = "custom_model_development"
"""Kind of experiment whose page opens on training runs in MLflow's mode for model training; without one MLflow asks."""
_VIEW = "starling"
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW}"
"""Tag of an experiment with the columns of its list of runs, for links that name the view."""
_EXPERIMENT_VIEW = f"{_TRAINING_VIEW}&viewStateShareKey={_VIEW}"
_RUNS_TEXT = "List of runs with word error rates"
_PARAMS_PER_CALL = 100
_VALUE_LENGTH = 6000


def client() -> mlflow.MlflowClient:
    """A client of the configured MLflow, without telemetry and without unpickling.

    Raises:
        EmbeddedDatabaseError: If MLflow's database in the data folder cannot be used; the message names a remedy.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # stages show their own progress bars
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # artifacts and summaries contain the links
    uri = mlflow_uri()
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # this logger prints tracebacks of errors that are also raised
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if (database := database_of(uri)) is not None:
        make_ready(database)
    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(uri)  # explicit, since another thread may change the global address


@contextmanager
def impatient(seconds: int, always: bool = False) -> Iterator[None]:
    """Limit the time of requests to MLflow, and disable their retries, within the block.

    Args:
        seconds: Time limit of a request.
        always: Whether to override the user's settings.
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
    """Id of an experiment by name; created if missing. Its kind is training, unless a user chose one."""
    experiment = api.get_experiment_by_name(name)
    if experiment is not None:
        if _KIND_TAG not in experiment.tags:
            api.set_experiment_tag(experiment.experiment_id, _KIND_TAG, _KIND)
        return str(experiment.experiment_id)
    local = mlflow_uri().startswith("sqlite:") or not os.environ.get("MLFLOW_TRACKING_URI")
    location = (mlflow_artifacts() / name).as_uri() if local else None
    return str(api.create_experiment(name, artifact_location=location, tags={_KIND_TAG: _KIND}))


def show_rates(api: mlflow.MlflowClient, experiment: str, sets: Iterable[str]) -> None:
    """Give an experiment a view of its runs with word error rates, and a link to it unless it has a description.

    MLflow's own view of runs has no metric until a user adds one.

    Args:
        api: MLflow client.
        experiment: Its id.
        sets: Scored sets.
    """
    tags = api.get_experiment(experiment).tags
    columns = [f"metrics.`{name}.wer`" for name in sets]
    columns += [f"metrics.`{VALID_WER}`", f"tags.`{DECISION_TAG}`"]
    # MLflow's list of experiments shows the first words, as plain text
    link = f"Trainings and their error rates: [{_RUNS_TEXT}](#/experiments/{experiment}/runs{_EXPERIMENT_VIEW})"
    wanted = {_VIEW_TAG: json.dumps({"selectedColumns": columns})} | ({} if NOTE_TAG in tags else {NOTE_TAG: link})
    for name, value in wanted.items():
        if tags.get(name) != value:
            api.set_experiment_tag(experiment, name, value)


def ui_links(run: Run, name: str = "", version: str = "") -> dict[str, str]:
    """URLs of MLflow's pages of a run and of a model version; empty if MLflow is not a server.

    Args:
        run: The run.
        name: Registered model.
        version: Version of the model.
    """
    base = shown_mlflow_uri().rstrip("/")
    if not base.startswith(("http://", "https://")):
        return {}
    runs = f"experiments/{run.info.experiment_id}/runs{_EXPERIMENT_VIEW}"
    links = {"MLflow run": f"{base}/#/{_page(run)}{_TRAINING_VIEW}", "all runs": f"{base}/#/{runs}"}
    if name and version:
        links["model version"] = f"{base}/#/models/{quote(name)}/versions/{version}{_TRAINING_VIEW}"
    return links


def _page(run: Run) -> str:
    return f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}"


def artifact_link(run: Run, path: str) -> str:
    """URL of MLflow's page of an artifact; empty if MLflow is not a server.

    Args:
        run: The run.
        path: The artifact.
    """
    base = shown_mlflow_uri().rstrip("/")
    if not base.startswith(("http://", "https://")):
        return ""
    return f"{base}/#/{_page(run)}/artifacts/{quote(path)}{_TRAINING_VIEW}"


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a nested configuration to dotted parameters; lists become JSON."""
    flat: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            flat |= flatten(item, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.dumps(item) if isinstance(item, list) else str(item)
    return flat


@dataclass(frozen=True)
class TrainingRun:
    """Description of a training for its MLflow run."""

    training: str
    """Identity of the training."""
    experiment: str
    """Name of the experiment."""
    name: str
    """Name of the run."""
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    """Only parameters that a resume cannot change, since MLflow does not allow changes."""
    inputs: Sequence[DatasetInput] = ()
    """Data sets that it reads."""
    learner_metrics: bool = True
    """Whether the run has metrics of single learners."""


def open_training_run(api: mlflow.MlflowClient, about: TrainingRun, known: str = "") -> Run:
    """The MLflow run of a training, with the status RUNNING; created if missing.

    Args:
        api: MLflow client.
        about: The training.
        known: Id of the run, if known.
    """
    run = (_run_of(api, about.training, known) if known else None) or find_training_run(api, about)
    experiment = experiment_id(api, about.experiment)
    end_abandoned(api, experiment, run.info.run_id if run else "")
    if run is None:
        tags = {TRAINING_TAG: about.training, **about.tags, **owner_tags(about.name)}
        run = api.create_run(experiment, run_name=about.name, tags=tags)
    else:
        set_tags(api, run.info.run_id, owner_tags(about.name))
        if run.info.status != "RUNNING":
            continue_run(api, run)
    log_params(api, run, about.params)
    log_inputs(api, run, about.inputs)
    return run


def status_after(error: type[BaseException] | None) -> tuple[str, str]:
    """MLflow's status of a run whose work has ended, and why it was stopped, if it was.

    Args:
        error: What ended the work; None if it is done.
    """
    if error is None or issubclass(error, Exception):
        return "FAILED" if error else "FINISHED", ""
    return (
        "KILLED",
        f"{STOPPED} by {'Ctrl-C' if issubclass(error, KeyboardInterrupt) else 'a signal or a cancellation'}",
    )


def end_run(api: mlflow.MlflowClient, run_id: str, status: str, reason: str = "") -> None:
    """End a run.

    Args:
        api: MLflow client.
        run_id: The run.
        status: MLflow's status; it has none for a run that was stopped, and calls it KILLED.
        reason: Why it was stopped; its description says so, too.
    """
    if reason:
        note = f"This run was {reason}; the same command continues it."
        set_tags(api, run_id, {ENDED_TAG: reason, NOTE_TAG: note})
    api.set_terminated(run_id, status)


def continue_run(api: mlflow.MlflowClient, run: Run) -> None:
    """Give a run that had ended the status RUNNING again."""
    for tag in (ENDED_TAG, NOTE_TAG):
        if tag in run.data.tags:
            api.delete_tag(run.info.run_id, tag)
    api.update_run(run.info.run_id, status="RUNNING")


def owner_tags(name: str) -> dict[str, str]:
    """The tag of a run that this process writes to.

    Args:
        name: Name of the pipeline's run.
    """
    return {OWNER_TAG: json.dumps(asdict(LockOwner.here(name)))}


def end_abandoned(api: mlflow.MlflowClient, experiment: str, own: str, key: str = "") -> None:
    """End the runs of an experiment whose processes are gone: MLflow would show them as running for ever.

    Args:
        api: MLflow client.
        experiment: Id of the experiment.
        own: Id of the run that this process writes to.
        key: Address of an output that this process alone makes: other running runs with it are abandoned, too.
    """
    for run in api.search_runs([experiment], "attributes.status = 'RUNNING'"):
        owner, same = _owner(run), bool(key) and run.data.tags.get(KEY_TAG) == key
        if run.info.run_id != own and (same or owner.gone()):
            set_tags(api, run.info.run_id, {ENDED_TAG: f"its process ended before it could say why ({owner})"})
            api.set_terminated(run.info.run_id, "KILLED")


def _owner(run: Run) -> LockOwner:
    try:
        return LockOwner.read(json.loads(run.data.tags.get(OWNER_TAG, "null")))
    except json.JSONDecodeError:
        return LockOwner.read(None)


def find_training_run(api: mlflow.MlflowClient, about: TrainingRun) -> Run | None:
    """The run tagged with a training's identity, or None."""
    experiment = api.get_experiment_by_name(about.experiment)
    if experiment is None:
        return None
    runs = api.search_runs([experiment.experiment_id], f"tags.`{TRAINING_TAG}` = '{about.training}'", max_results=1)
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
    """Log the parameters that the run does not have yet."""
    new = [Param(name, value[:_VALUE_LENGTH]) for name, value in params.items() if name not in run.data.params]
    for start in range(0, len(new), _PARAMS_PER_CALL):
        api.log_batch(run.info.run_id, params=new[start : start + _PARAMS_PER_CALL])


def log_inputs(api: mlflow.MlflowClient, run: Run, inputs: Iterable[DatasetInput]) -> None:
    """Log the data sets that the run does not have yet."""
    known = {(logged.dataset.name, logged.dataset.digest) for logged in run.inputs.dataset_inputs}
    new = [entry for entry in inputs if (entry.dataset.name, entry.dataset.digest) not in known]
    if new:
        api.log_inputs(run.info.run_id, datasets=new)


def set_tags(api: mlflow.MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    """Set several tags at once."""
    api.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
