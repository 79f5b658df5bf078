"""The flow `monitor`: compares what servers have recognized with the model's test sets, and tells of differences."""

from dataclasses import asdict
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.definition import flow
from flows.deploy.concurrency import in_turn
from flows.names import stamp
from tasks.config.pipeline import MonitorConfig, PipelineConfig
from tasks.orchestration.artifacts import artifact_key, quietly
from tasks.tracking.monitoring import MonitorReport, monitor_model, monitored


def _name() -> str:
    given = flow_run.parameters
    return f"monitor {given.get('model') or getattr(given.get('config'), 'model_name', '')} {stamp()}"


@flow(name="monitor", flow_run_name=_name, persist_result=False)
@in_turn
def monitor(config: PipelineConfig | None = None, model: str = "", settings: MonitorConfig | None = None) -> Any:
    """Compare what servers have recognized in the last hours with the test sets, and send an event if they differ.

    Args:
        config: The pipeline's configuration; it names the registered model, and its section `monitor` the logs.
        model: Registered model, instead of the configuration's.
        settings: Instead of the configuration's section `monitor`.
    """
    report = monitor_model(*monitored(config, model, settings))
    get_run_logger().info("%s", report.message)
    quietly(lambda: _show(report))
    return Completed(name=report.outcome, message=report.message)


def _show(report: MonitorReport) -> None:
    """Show the comparisons, or else the hours, on the run's page in the Prefect UI."""
    rows = [asdict(entry) for entry in report.comparisons] or report.hours
    create_table_artifact(
        table=rows or [{"utterances": 0}],
        key=artifact_key(report.model, "monitor"),
        description=report.message,
    )
