"""Stages as Prefect tasks.

Stages read from and write to the object store; tasks of one process pass only the run's id, so that Prefect's database
contains neither data nor pickles.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Completed

from tasks import STAGES
from tasks.config.pipeline import PipelineConfig
from tasks.dataset.duplicates import data_warnings, doubles_of
from tasks.dataset.speakers import sets_text
from tasks.failures import DELAYS_S, JITTER, RETRIES, retry_when_passing
from tasks.orchestration.artifacts import ProgressArtifact, publish
from tasks.orchestration.logs import COPIED, secrets_kept, show_lines_once
from tasks.stages import progress
from tasks.stages.base import Run, Stage, counts_text, get_stage, position, stages_of
from tasks.stages.initial import initial_model
from tasks.stages.preflight import check_names
from tasks.stages.prepare import PREPARE
from tasks.stages.runner import check_runner
from tasks.stages.train import TRAIN

_log = logging.getLogger(__name__)
_runs: dict[str, Run] = {}


def open_run(config: PipelineConfig, run_id: str, force_from: str = "") -> Run:
    """The run of this id in this process; created if it is new.

    Raises:
        StageError: If its cluster's package is not installed.
    """
    check_runner(config.runner, within_flow=True)
    return _runs.setdefault(run_id, Run(config, run_id, force_from))


def close_run(run_id: str) -> None:
    """Forget a run of this process."""
    _runs.pop(run_id, None)


def lines_logged(logger: Any, stage: str = "") -> AbstractContextManager[None]:
    """Log the lines of a stage, or of all stages, while the block runs.

    The lines of all stages are copies for the log of the enclosing run, and not for consoles.
    """
    extra = None if stage else {COPIED: True}
    if not stage:
        show_lines_once()

    def log(name: str, text: str) -> None:
        if stage in ("", name):
            logger.info("%s: %s", name, text, extra=extra)

    return progress.following(log)


def _call(stage: Stage[Any]) -> Any:
    def call(run_id: str) -> Any:
        run = _runs[run_id]
        bar, logger = ProgressArtifact(run, stage.name), get_run_logger()
        with progress.listening(bar), lines_logged(logger, stage.name), secrets_kept():
            result = stage.execute(run)
        bar.finish()
        if stage is PREPARE:
            _tell_sets(run, logger)
            check_names(run)
        publish(run, result)
        summary = f"{counts_text(result.counts)}; {result.url}"
        return Completed(name="Cached", message=summary) if result.cached else Completed(message=summary)

    call.__name__ = stage.name
    call.__doc__ = f"Run the stage {stage.name}."
    return call


def _tell_sets(run: Run, logger: Any = _log) -> None:
    """Tell the size of each set and duplicates, and warn about shared speakers and recordings, before training.

    Args:
        run: A run whose data sets are known.
        logger: Of its Prefect task, which has the warnings in any case; the other one where nobody follows lines.
    """
    record, data = run.result("prepare").record, run.config.data
    logger.info("sets: %s", sets_text(record))
    if record["duplicates"]:
        logger.info("duplicates: %s", " ".join(doubles_of(record, data)))
    for warning in data_warnings(record, data):
        if logger is not _log or not progress.followed():
            logger.warning(warning)
        if run.trial is None and data.fold <= 1:  # all trials and folds have the same speech
            progress.announce(PREPARE.name, f"warning: {warning}")


def stage_task(stage: Stage[Any]) -> Callable[[str], Any]:
    """A Prefect task that runs a stage, and retries it after transient failures.

    Prefect's cache is not used: the stage itself knows whether its work is done.
    """
    decorate: Any = task(
        name=stage.name,
        persist_result=False,
        cache_policy=NO_CACHE,
        retries=RETRIES,
        retry_delay_seconds=list(DELAYS_S),
        retry_jitter_factor=JITTER,
        retry_condition_fn=retry_when_passing,
    )
    decorated: Callable[[str], Any] = decorate(_call(stage))
    return decorated


TASKS: dict[str, Callable[[str], Any]] = {name: stage_task(get_stage(name)) for name in STAGES}


def run_stage(name: str, run: Run) -> None:
    """Run one stage as a Prefect task of the calling flow."""
    TASKS[name](run.run_id)


def run_plainly(run: Run, until: str = "report", stages: Sequence[str] | None = None) -> None:
    """Run stages, by default all that the configuration has, one after another without Prefect.

    Raises:
        StageError: If the configuration needs Prefect.
    """
    check_runner(run.config.runner, within_flow=False)
    names = [
        name for name in (stages_of(run.config) if stages is None else stages) if position(name) <= position(until)
    ]
    if TRAIN.name in names:
        initial_model(run)
    for name in names:
        get_stage(name).execute(run)
        if name == PREPARE.name:
            _tell_sets(run)
            check_names(run)
