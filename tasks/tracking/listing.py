"""What MLflow holds, for people: the registered models with their error rates, and the runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import mlflow
from mlflow.entities import Run

from tasks.scores import GROUPS
from tasks.tracking.known_models import named, registered_models, unknown_model, versions_named
from tasks.tracking.metrics import ELAPSED, VALID_WER
from tasks.tracking.registry import RegistryError
from tasks.tracking.runs import DECISION_TAG, ENDED_TAG, STOPPED

_RATE = ".wer"
_PARTS = tuple(f".{group}." for group in GROUPS.values())
"""Parts of names of error rates that are not of a whole set, such as `test.domain.read.wer`."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model."""

    model: str
    version: str
    aliases: tuple[str, ...]
    wer: dict[str, float]
    """Word error rate by test set."""
    registered: datetime
    decision: str
    """Why it is the champion, or why not."""


@dataclass(frozen=True)
class TrackedRun:
    """A run of a pipeline."""

    name: str
    experiment: str
    """Name of its configuration."""
    status: str
    """running, finished, failed, stopped or killed."""
    logged: datetime
    """When MLflow first heard of it: when its training started, or later if MLflow could not be reached."""
    training_seconds: float | None
    """Time of training until its last logged step, over all sessions, without pauses; None without a step."""
    wer: dict[str, float]
    """Word error rate by test set; that of the validation set as `valid` if no test set was scored."""
    decision: str
    """What became of its model, or what stopped the run; empty if neither."""


def list_versions(api: mlflow.MlflowClient, name: str = "") -> list[RegisteredVersion]:
    """The versions of a model, newest first; without a name, those of all models that have an alias.

    If none has one, as in a registry of other programs, the newest version of each is listed.

    Args:
        api: MLflow client.
        name: Registered model.

    Raises:
        RegistryError: If the registry has no such model.
    """
    models = list(registered_models(api))
    if name and name not in (known := [model.name for model in models]):
        raise RegistryError(unknown_model(name, known))
    found = {
        model.name: [_version(version, model.aliases) for version in versions_named(api, model.name)]
        for model in models
        if name in ("", model.name)
    }
    if name:
        return found[name]
    with_alias = [version for versions in found.values() for version in versions if version.aliases]
    return with_alias or [versions[0] for versions in found.values() if versions]


def list_runs(api: mlflow.MlflowClient, experiment: str = "", limit: int = 20) -> list[TrackedRun]:
    """The last runs, newest first.

    Args:
        api: MLflow client.
        experiment: Name of a configuration; empty for all.
        limit: Maximum number of runs.
    """
    experiments = api.search_experiments(filter_string=named(experiment) if experiment else None)
    names = {each.experiment_id: each.name for each in experiments if experiment in ("", each.name)}
    if not names:
        return []
    runs = api.search_runs(list(names), max_results=limit, order_by=["attributes.start_time DESC"])
    return [_run(run, names[run.info.experiment_id]) for run in runs]


def _version(version: Any, aliases: Mapping[str, str]) -> RegisteredVersion:
    return RegisteredVersion(
        model=version.name,
        version=str(version.version),
        aliases=tuple(sorted(alias for alias, number in aliases.items() if str(number) == str(version.version))),
        wer=_rates(version.tags),
        registered=_time(version.creation_timestamp),
        decision=version.tags.get(DECISION_TAG, ""),
    )


def _run(run: Run, experiment: str) -> TrackedRun:
    info, figures = run.info, run.data.metrics
    valid = {"valid": figures[VALID_WER]} if VALID_WER in figures else {}
    ended = run.data.tags.get(ENDED_TAG, "")
    return TrackedRun(
        name=info.run_name or info.run_id,
        experiment=experiment,
        status=STOPPED if ended.startswith(STOPPED) else info.status.lower(),
        logged=_time(info.start_time),
        training_seconds=figures.get(ELAPSED),
        wer=_rates(figures) or valid,
        decision=run.data.tags.get(DECISION_TAG, ended),
    )


def _rates(values: Mapping[str, Any]) -> dict[str, float]:
    """Error rates of whole sets among metrics or tags; a tag that others have written may be anything."""
    names = [name for name in values if name.endswith(_RATE) and not any(part in name for part in _PARTS)]
    return {name.removesuffix(_RATE): rate for name in sorted(names) if (rate := _number(values[name])) is not None}


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
