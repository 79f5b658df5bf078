"""The flow `crossvalidate`: train and score each fold, one after another, and report mean and spread."""

from collections.abc import Callable
from typing import Any

from prefect import tags
from rich.console import Console
from rich.table import Table

from flows.definition import flow
from flows.deploy.concurrency import in_turn
from flows.names import TAG, new_run_id, pipeline_name
from flows.pipeline import INGEST, TRAIN, pipeline
from flows.summary import summarize
from tasks.config.pipeline import PipelineConfig
from tasks.dataset.sets import fold_name
from tasks.figures import percent
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run
from tasks.stages.folds import combine, fold_configs
from tasks.tracking.fold_tracking import log_folds

UNTIL = "score"


def cross_validate(
    config: PipelineConfig, folds: int, run_id: str, run_fold: Callable[[PipelineConfig, str], dict[str, Any]]
) -> dict[str, Any]:
    """Run each fold and combine the scores.

    Args:
        config: The configuration; `data.folds` and `data.fold` are set for each run.
        folds: Number of folds.
        run_id: Name of the cross-validation; the folds' runs are named after it.
        run_fold: Runs one configuration under a name and returns its summary.
    """
    runs = [
        run_fold(chosen, f"{run_id}-{fold_name(n)}") for n, chosen in enumerate(fold_configs(config, folds), start=1)
    ]
    result = combine([run["sets"] for run in runs])
    # with `recognizer: gmm` there is no training
    trainings = [run["training"]["identity"] if run["training"] else "" for run in runs]
    parent = log_folds(config, run_id, result, trainings)
    return {"run_id": run_id, "mlflow_run": parent, **result, "runs": runs}


@flow(name="crossvalidate", flow_run_name=pipeline_name("", "{config.corpora}, {folds} folds"), persist_result=False)
@in_turn
def crossvalidate(config: PipelineConfig, folds: int, run_id: str = "", force_from: str = "") -> dict[str, Any]:
    """Train and score every fold of a configuration.

    Args:
        config: The pipeline's configuration.
        folds: Number of folds.
        run_id: Name of the run; generated if empty.
        force_from: Run this stage and all later ones again.

    Returns:
        What `starling run --folds K --json` prints.
    """

    run: Any = pipeline  # a flow's types omit what it returns

    def run_fold(chosen: PipelineConfig, name: str) -> dict[str, Any]:
        with tags(TAG):
            summary: dict[str, Any] = run(chosen, name, _forced(chosen, force_from), UNTIL)
        return summary

    return cross_validate(config, folds, run_id or new_run_id(config), run_fold)


def crossvalidate_plainly(config: PipelineConfig, folds: int, force_from: str = "") -> dict[str, Any]:
    """Train and score every fold of a configuration, without Prefect."""

    def run_fold(chosen: PipelineConfig, name: str) -> dict[str, Any]:
        run = Run(chosen, name, _forced(chosen, force_from))
        run_plainly(run, UNTIL)
        return summarize(run)

    return cross_validate(config, folds, new_run_id(config), run_fold)


def _forced(config: PipelineConfig, force_from: str) -> str:
    """The first stage that a fold runs again; stages that all folds share run again for the first fold only."""
    shared = force_from in INGEST and config.data.fold > 1
    return TRAIN[0] if shared else force_from


def print_folds(result: dict[str, Any], console: Console) -> None:
    """Print the table of a cross-validation."""
    table = Table(title=result["run_id"], title_justify="left", header_style="bold")
    table.add_column("fold")
    for head in ("WER", "CER", "words", "utterances"):
        table.add_column(head, justify="right")
    for number, fold in enumerate(result["folds"], start=1):
        counts = (f"{fold[name]:,}" for name in ("words", "utterances"))
        table.add_row(fold_name(number), percent(fold["wer"]), percent(fold["cer"]), *counts)
    table.add_section()
    for statistic in ("mean", "std"):
        table.add_row(statistic, *(percent((result[f] or {}).get(statistic)) for f in ("wer", "cer")), "", "")
    table.add_row("pooled", percent(result["pooled_wer"]), "", "", "")
    for name, spread in result["sets"].items():
        wer = spread["wer"]
        table.add_row(name, f"{percent(wer['mean'])} ± {percent(wer['std'])}" if wer else "–", "", "", "")
    console.print(table)
    console.print(f"MLflow  {result['mlflow_run']}", highlight=False)
