"""The flow `verify_storage`: is everything that the indexes promise there, and whole?"""

from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger
from prefect.states import Completed

from flows.deploy.concurrency import in_turn
from storage.audit import VerifyReport, verify
from storage.objects import ObjectStore
from tasks.config.credentials import export_credentials
from tasks.config.home import objects_url
from tasks.config.pipeline import PipelineConfig

_SHOWN = 200


class DamageError(RuntimeError):
    """A store lacks something that its indexes promise, or has it damaged."""


@flow(name="verify-storage", flow_run_name="verify storage of {config.name}", persist_result=False)
@in_turn
def verify_storage(config: PipelineConfig, quick: bool = False) -> Any:
    """Compare everything in the configuration's object store with indexes and records; fail where it is damaged.

    Args:
        config: The pipeline's configuration, of which `storage` says where and by whose credentials.
        quick: Compare sizes only; read nothing but indexes and records.

    Raises:
        DamageError: Something is missing or damaged; the table names it.
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
            f"`starling storage verify --url {store.url}` shows all; with `--repair` it takes away what is damaged, "
            "and the next run of its pipeline makes that again."
        )
    if not (report.indexes or report.objects):
        return Completed(name="Empty", message=f"{store.url} holds no output of any stage")
    return Completed(message=f"{text}: all whole")


def _publish(name: str, text: str, report: VerifyReport) -> None:
    rows = [{"object": problem.object, "what is wrong": problem.reason} for problem in report.problems[:_SHOWN]]
    key = "storage-" + "".join(c if c.isalnum() else "-" for c in name.lower())
    create_table_artifact(
        table=rows or [{"object": "all", "what is wrong": "nothing"}],
        key=key,
        description=f"{text}: {len(report.problems)} problems",
    )
