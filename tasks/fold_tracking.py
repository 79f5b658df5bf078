"""Cross-validation in MLflow: one parent run with the mean and the spread, the folds' trainings below it."""

from typing import Any

from tasks.config import PipelineConfig
from tasks.tracking import TrainingRun, client, experiment_id, find_training_run, impatient, set_tags

_PARENT_TAG, _NAME_TAG, _CROSS_TAG = "mlflow.parentRunId", "mlflow.runName", "starling.folds"
_PATIENCE_S = 20


def figures(result: dict[str, Any]) -> dict[str, float]:
    """The metrics of a cross-validation."""
    found = {"pooled_wer": result["pooled_wer"]}
    for name in ("wer", "cer"):
        found |= {f"{name}_{statistic}": value for statistic, value in (result[name] or {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def log_folds(config: PipelineConfig, run_id: str, result: dict[str, Any], trainings: list[str]) -> str:
    """Write the parent run and put the folds' runs below it; again for the same run id changes nothing.

    Args:
        config: What was cross-validated.
        run_id: Name of the cross-validation.
        result: From `tasks.folds.combine`.
        trainings: Identities of the folds' trainings.

    Returns:
        The parent's run id, or why there is none: a tracking server that is away costs the figures nothing.
    """
    try:
        with impatient(_PATIENCE_S):
            return _log(config, run_id, result, trainings)
    except Exception as error:  # any tracking trouble: the figures are printed and returned all the same
        return f"not in MLflow: {type(error).__name__}"


def _log(config: PipelineConfig, run_id: str, result: dict[str, Any], trainings: list[str]) -> str:
    api = client()
    tags = {_CROSS_TAG: str(len(trainings)), "starling.run": run_id}
    parent = api.create_run(experiment_id(api, config.name), run_name=run_id, tags=tags)
    for name, value in figures(result).items():
        api.log_metric(parent.info.run_id, name, value)
    api.log_dict(parent.info.run_id, result, "folds.json")
    for number, training in enumerate(trainings, start=1):
        child = find_training_run(api, TrainingRun(training, config.name, ""))
        if child is not None:
            wanted = {_PARENT_TAG: parent.info.run_id, _NAME_TAG: f"{run_id}-fold-{number}"}
            set_tags(api, child.info.run_id, wanted)
    api.set_terminated(parent.info.run_id)
    return str(parent.info.run_id)
