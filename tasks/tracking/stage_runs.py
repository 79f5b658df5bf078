"""MLflow runs of stages that have no training's run to write to."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow.entities import Metric

from tasks.stages.base import Run
from tasks.tracking.provenance import run_tags
from tasks.tracking.runs import (
    KEY_TAG,
    client,
    end_abandoned,
    experiment_id,
    flatten,
    impatient,
    log_params,
    owner_tags,
    set_tags,
)

STAGE_TAG = "starling.stage"
_PATIENCE_S = 20
_METRICS_PER_CALL = 500


def log_stage(
    run: Run, stage: str, key: str, figures: Mapping[str, float], iterations: Sequence[Mapping[str, Any]] = ()
) -> dict[str, str]:
    """Write a stage's figures to an MLflow run of its own; repeated for the same output, it is the same run.

    Args:
        run: The pipeline's run.
        stage: The stage, a section of the configuration.
        key: Address of its output.
        figures: Metrics of the result.
        iterations: Figures of each iteration of the work, in order; numbers become metrics with the position as step.

    Returns:
        `run`: id of the MLflow run; or `error`: why there is none. Without MLflow the stage's work is still done.
    """
    try:
        with impatient(_PATIENCE_S):
            return {"run": _log(run, stage, key, figures, iterations)}
    except Exception as error:  # after any tracking error, the stage's output is published
        return {"error": type(error).__name__}


def _log(run: Run, stage: str, key: str, figures: Mapping[str, float], iterations: Sequence[Mapping[str, Any]]) -> str:
    api = client()
    experiment = experiment_id(api, run.config.name)
    runs = api.search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    tags = {KEY_TAG: key, **owner_tags(run.run_id)}
    known = runs[0] if runs else api.create_run(experiment, run_name=f"{run.run_id}-{stage}", tags=tags)
    identity = str(known.info.run_id)
    end_abandoned(api, experiment, identity)
    set_tags(api, identity, {STAGE_TAG: stage, **run_tags(run)})
    section = getattr(run.config, stage).model_dump(mode="json")
    log_params(api, known, flatten({stage: section}))
    if not runs:
        at_ms = known.info.start_time
        points = [
            Metric(f"{stage}.iteration.{name}", float(value), at_ms, step)
            for step, row in enumerate(iterations, start=1)
            for name, value in row.items()
            if isinstance(value, int | float)
        ]
        for start in range(0, len(points), _METRICS_PER_CALL):
            api.log_batch(identity, metrics=points[start : start + _METRICS_PER_CALL])
    for name, value in figures.items():
        if known.data.metrics.get(name) != value:
            api.log_metric(identity, name, value)
    api.set_terminated(identity)
    return identity
