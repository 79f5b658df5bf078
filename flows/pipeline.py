"""The flows: `ingest`, `train`, `evaluate`, and `pipeline`, which chains them.

Each flow can run on its own, from a schedule, the UI or the command line: finished stages are found by the digest of
their inputs and are not repeated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prefect import tags
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.definition import flow
from flows.deploy.concurrency import in_turn
from flows.models import fetch_model, model_uri
from flows.names import TAG, new_run_id, pipeline_name
from flows.servers.prefect_api import lasting_url
from flows.summary import summarize, summarize_evaluation
from flows.watch import waiting
from tasks import STAGES
from tasks.config.pipeline import PipelineConfig
from tasks.locking.slots import OUTAGE_S, run_log
from tasks.orchestration.artifacts import publish_summary
from tasks.orchestration.reachable import check_servers
from tasks.orchestration.stage_tasks import close_run, lines_logged, open_run, run_plainly, run_stage
from tasks.stages.base import Run, position, stages_of
from tasks.stages.evaluation import evaluation_stages, use_model
from tasks.stages.initial import initial_model

INGEST, TRAIN = STAGES[: STAGES.index("train")], ("train",)
_ABOUT = "{config.corpora}, {config.model.kind}"
EVALUATE = STAGES[STAGES.index("train") + 1 :]


@contextmanager
def _run(config: PipelineConfig, run_id: str, force_from: str, until: str) -> Iterator[Run]:
    """Join the run of this id, or open a new one that is closed with this flow."""
    own = not run_id
    if own:
        check_servers(config, until, run_log().warning, OUTAGE_S)
    run = open_run(config, run_id or new_run_id(config), force_from)
    run.flow_run_url = run.flow_run_url or lasting_url(flow_run.ui_url)
    try:
        yield run
    finally:
        if own:
            close_run(run.run_id)


def _stages(run: Run, names: Sequence[str], until: str) -> None:
    for name in stages_of(run.config):
        if name in names and name not in run.results and position(name) <= position(until):
            run_stage(name, run)


@flow(name="ingest", flow_run_name=pipeline_name("ingest"), persist_result=False)
@in_turn
def ingest(config: PipelineConfig, run_id: str = "", force_from: str = "", until: str = "features") -> dict[str, Any]:
    """Read corpora, shard them, compute feature statistics.

    Args:
        config: The pipeline's configuration.
        run_id: A run of this process to join; empty starts a new one.
        force_from: Run this stage and all later ones again.
        until: Last stage.
    """
    with _run(config, run_id, force_from, until) as run:
        _stages(run, INGEST, until)
        return summarize(run)


@flow(name="train", flow_run_name=pipeline_name("train", _ABOUT), persist_result=False)
@in_turn
def train(config: PipelineConfig, run_id: str = "", force_from: str = "", from_model: str = "") -> dict[str, Any]:
    """Train an acoustic model; ingests first if needed.

    Args:
        config: The pipeline's configuration.
        run_id: A run of this process to join; empty starts a new one.
        force_from: Run this stage and all later ones again.
        from_model: Model that training begins with, such as @champion; by default as `train.init` says.
    """
    config = config.beginning_with(from_model)
    with _run(config, run_id, force_from, TRAIN[-1]) as run:
        initial_model(run)
        _stages(run, [*INGEST, *TRAIN], "report")
        return summarize(run)


@flow(name="evaluate", flow_run_name=pipeline_name("evaluate"), persist_result=False)
@in_turn
def evaluate(
    config: PipelineConfig,
    run_id: str = "",
    force_from: str = "",
    until: str = "report",
    only_waiting: bool = False,
    model: str = "",
    as_configured: bool = False,
) -> Any:
    """Decode and score the test sets, register the model, write the report; trains first if needed.

    With `model`, that model is decoded and scored instead, and nothing is trained or registered.

    Args:
        config: The pipeline's configuration.
        run_id: A run of this process to join; empty starts a new one.
        force_from: Run this stage and all later ones again.
        until: Last stage.
        only_waiting: Do nothing unless a registered challenger waits for its evaluation.
        model: An existing model: NAME (its champion), NAME@ALIAS, NAME/VERSION, models:/…, or a bundle's folder.
        as_configured: Decode that model as the section `decode` says even if that is the default; otherwise the default
            means the model's own decoder.
    """
    if only_waiting and not waiting(config):
        return Completed(name="NothingWaits", message=f"no challenger of {config.model_name} waits for evaluation")
    with _run(config, run_id, force_from, "score" if model else until) as run:
        if model:
            use_model(run, fetch_model(model_uri(model)), as_configured)
            _stages(run, evaluation_stages(), "score")
            return summarize_evaluation(run, model)
        if position(until) >= position(TRAIN[0]):
            initial_model(run)
        _stages(run, STAGES, until)
        return summarize(run)


def evaluate_plainly(config: PipelineConfig, model: str) -> dict[str, Any]:
    """Decode and score the test sets with an existing model, without Prefect."""
    run = Run(config, new_run_id(config), bundle=fetch_model(model))
    run_plainly(run, "score", evaluation_stages())
    return summarize_evaluation(run, model)


@flow(name="pipeline", flow_run_name=pipeline_name("", _ABOUT), persist_result=False)
@in_turn
def pipeline(
    config: PipelineConfig, run_id: str = "", force_from: str = "", until: str = "report", from_model: str = ""
) -> dict[str, Any]:
    """Run all stages, from a corpus to a registered recognizer.

    The stages run in nested flow runs; their lines are in this run's log, too.

    Args:
        config: The pipeline's configuration.
        run_id: Name of the run; generated if empty.
        force_from: Run this stage and all later ones again.
        until: Last stage.
        from_model: Model that training begins with, such as @champion; by default as `train.init` says.

    Returns:
        The object that `starling run --json` prints.
    """
    config = config.beginning_with(from_model)
    check_servers(config, until, run_log().warning, OUTAGE_S)
    run_id = run_id or new_run_id(config)
    run = open_run(config, run_id, force_from)
    run.flow_run_url = lasting_url(flow_run.ui_url)
    last = position(until)
    try:
        if last >= position(TRAIN[0]):
            initial_model(run)
        with tags(TAG), lines_logged(get_run_logger()):
            ingest(config, run_id, force_from, until if until in INGEST else INGEST[-1])
            if last >= position(TRAIN[0]):
                train(config, run_id, force_from)
            if last >= position(EVALUATE[0]):
                evaluate(config, run_id, force_from, until)
        publish_summary(run)
        return summarize(run)
    finally:
        close_run(run_id)
