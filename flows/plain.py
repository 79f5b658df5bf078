"""A pipeline as one function call: without Prefect's flows, in this process."""

from typing import Any

from flows.names import new_run_id
from flows.summary import summarize
from tasks.config.pipeline import PipelineConfig
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run


def run_pipeline(config: PipelineConfig, force_from: str = "", until: str = "report") -> dict[str, Any]:
    """Run the stages of a pipeline one after the other, as `starling run --no-prefect` does.

    Stages whose inputs and configuration have not changed are taken from the object store.

    Args:
        config: The pipeline's configuration.
        force_from: Run this stage and all later ones again.
        until: Last stage.

    Returns:
        The object that `starling run --json` prints: among others `sets` with the scores, and `model_uri`.

    Raises:
        StageError: If a stage cannot do its work; the message says why.
    """
    run = Run(config, new_run_id(config), force_from)
    run_plainly(run, until)
    return summarize(run)
