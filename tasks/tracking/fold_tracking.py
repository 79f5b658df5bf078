"""Cross-validation in MLflow: a parent run with mean and spread, and the folds' trainings as its children."""

from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from storage.stages import digest_json
from tasks.config.pipeline import PipelineConfig
from tasks.dataset.sets import fold_name
from tasks.tracking.runs import (
    TrainingRun,
    client,
    experiment_id,
    find_training_run,
    impatient,
    owner_tags,
    set_tags,
)

_PARENT_TAG, _NAME_TAG, _CROSS_TAG = "mlflow.parentRunId", "mlflow.runName", "starling.folds"
_TRAININGS_TAG, _RUN_TAG = "starling.trainings", "starling.run"
_PATIENCE_S = 20
_FIGURES = ("wer", "cer")


def figures(result: dict[str, Any]) -> dict[str, float]:
    """Metrics of a cross-validation: over the folds, of each fold, and on further test sets."""
    metrics = {"pooled_wer": result["pooled_wer"]}
    for name in _FIGURES:
        metrics |= {f"{name}_{statistic}": value for statistic, value in (result[name] or {}).items()}
    for number, fold in enumerate(result["folds"], start=1):
        metrics |= {f"{fold_name(number)}.{name}": fold[name] for name in _FIGURES}
    for set_name, spreads in result["sets"].items():
        for name in _FIGURES:
            spread = spreads[name] or {}
            metrics |= {f"{set_name}.{name}_{statistic}": value for statistic, value in spread.items()}
    return {name: value for name, value in metrics.items() if value is not None}


def log_folds(config: PipelineConfig, run_id: str, result: dict[str, Any], trainings: list[str]) -> str:
    """Write the parent run and make the folds' runs its children; repeated for the same trainings, it is the same run.

    Args:
        config: The configuration that was cross-validated.
        run_id: Name of the cross-validation.
        result: From `tasks.stages.folds.combine`.
        trainings: Identities of the folds' trainings.

    Returns:
        The parent's run id, or a text that names the error: without a tracking server the scores are still returned.
    """
    try:
        with impatient(_PATIENCE_S):
            return _log(config, run_id, result, trainings)
    except Exception as error:  # after any tracking error, the scores are still printed and returned
        return f"not in MLflow: {type(error).__name__}"


def _parent(api: MlflowClient, config: PipelineConfig, run_id: str, trainings: list[str]) -> Run:
    """The run of a cross-validation of these trainings; created if missing."""
    experiment = experiment_id(api, config.name)
    # without the identities of all trainings, an earlier run of them cannot be found
    identity = digest_json(trainings) if all(trainings) else run_id
    parents = api.search_runs([experiment], f"tags.`{_TRAININGS_TAG}` = '{identity}'", max_results=1)
    if parents:
        return parents[0]
    tags = {_CROSS_TAG: str(len(trainings)), _TRAININGS_TAG: identity, _RUN_TAG: run_id, **owner_tags(run_id)}
    return api.create_run(experiment, run_name=run_id, tags=tags)


def _log(config: PipelineConfig, run_id: str, result: dict[str, Any], trainings: list[str]) -> str:
    api = client()
    parent = _parent(api, config, run_id, trainings)
    identity, name = parent.info.run_id, parent.info.run_name
    for figure, value in figures(result).items():
        if parent.data.metrics.get(figure) != value:
            api.log_metric(identity, figure, value)
    api.log_dict(identity, result, "folds.json")
    for number, training in enumerate(trainings, start=1):
        child = find_training_run(api, TrainingRun(training, config.name, "")) if training else None
        if child is not None:
            wanted = {_PARENT_TAG: identity, _NAME_TAG: f"{name}-{fold_name(number)}"}
            set_tags(api, child.info.run_id, wanted)
    api.set_terminated(identity)
    return str(identity)
