"""The flow `verify_storage`: checks that every indexed object exists and is intact."""

from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger
from prefect.states import Completed

from flows.definition import flow
from flows.deploy.concurrency import in_turn
from flows.names import stamped_name
from storage.audit import VerifyReport, verify
from storage.objects import ObjectStore
from tasks.config.credentials import export_credentials
from tasks.config.home import objects_url
from tasks.config.pipeline import PipelineConfig

_SHOWN = 200


class DamageError(RuntimeError):
    """An object listed in an index or record is missing or damaged."""


@flow(name="verify-storage", flow_run_name=stamped_name("verify storage of {config.name}"), persist_result=False)
@in_turn
def verify_storage(config: PipelineConfig, quick: bool = False) -> Any:
    """Check the configuration's object store against its indexes and records; fails on damage.

    Args:
        config: The pipeline's configuration; `storage` gives the store and its credentials.
        quick: Compare sizes only; read nothing but indexes and records.

    Raises:
        DamageError: If an object is missing or damaged; the table lists them.
    """
    export_credentials(config.storage)
    store = ObjectStore(objects_url(config.storage.url))
    report = verify(store, quick=quick)
    text = (
        f"{report.shards:,} shards ({report.bytes:,} bytes) of {report.indexes:,} indexes and {report.objects:,} other "
        f"objects in {store.url}"
    )
    get_run_logger().info("%s: %d problems", text, len(report.problems))
    _publish(config.name, text, report)
    if report.problems:
        first = report.problems[0]
        raise DamageError(
            f"{len(report.problems)} problems in {text}; the first: {first.object}: {first.reason}. "
            f"`starling storage verify --url {store.url}` shows all; with `--repair` it deletes damaged objects, "
            "and the next run of their pipeline recreates them."
        )
    if not (report.indexes or report.objects):
        return Completed(name="Empty", message=f"{store.url} holds no output of any stage")
    return Completed(message=f"{text}: all intact")


def _publish(name: str, text: str, report: VerifyReport) -> None:
    rows = [{"object": problem.object, "what is wrong": problem.reason} for problem in report.problems[:_SHOWN]]
    key = "storage-" + "".join(c if c.isalnum() else "-" for c in name.lower())
    create_table_artifact(
        table=rows or [{"object": "all", "what is wrong": "nothing"}],
        key=key,
        description=f"{text}: {len(report.problems)} problems",
    )
