"""The flows `promote` and `rollback`: compare a registered version with the champion, and undo a promotion."""

from collections.abc import Callable
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.definition import flow
from flows.names import stamp
from flows.servers.prefect_api import lasting_url
from tasks.config.pipeline import PipelineConfig
from tasks.orchestration.artifacts import artifact_key
from tasks.orchestration.logs import secrets_kept
from tasks.tracking.promotion import promote_version
from tasks.tracking.registry import RegistryError, record_links
from tasks.tracking.registry import rollback as roll_back
from tasks.tracking.significance import PromotionOptions


def _named(what: str) -> Callable[[], str]:
    """Returns a function that names a flow run after its model and its time."""

    def name() -> str:
        given = flow_run.parameters
        model = given.get("model") or getattr(given.get("config"), "model_name", "")
        return f"{what} {model} {stamp()}"

    return name


@flow(name="promote", flow_run_name=_named("promote"), persist_result=False)
def promote(
    config: PipelineConfig | None = None,
    model: str = "",
    version: str = "",
    force: bool = False,
    new_tests: bool = False,
    reason: str = "",
) -> dict[str, Any]:
    """Compare a version with the champion on the frozen test sets, and make it champion if it wins.

    Args:
        config: The pipeline's configuration; it names the registered model.
        model: Registered model, instead of the configuration's.
        version: The version; if empty, the waiting challenger.
        force: Promote regardless of the comparison; needs a reason.
        new_tests: Compare on the version's own test sets even if they are not the frozen ones, and freeze them.
        reason: Why.
    """
    name = model or (config.model_name if config is not None else "")
    if not name:
        raise RegistryError("no model given: set `model` to its name in the registry, or give a configuration")
    options = PromotionOptions(force=force, new_tests=new_tests, reason=reason)
    with secrets_kept():
        outcome = promote_version(name, version, options, link=lasting_url(flow_run.ui_url))
    get_run_logger().info("%s version %s: %s", name, outcome["version"], outcome["reason"])
    links = " · ".join(f"[{text}]({address})" for text, address in record_links(outcome).items())
    title = "promoted" if outcome["promoted"] else "not promoted"
    _show(name, "promotion", f"**{name} version {outcome['version']}: {title}**\n\n{outcome['reason']}\n\n{links}")
    return outcome


@flow(name="rollback", flow_run_name=_named("rollback"), persist_result=False)
def rollback(model: str, to: str = "", reason: str = "") -> dict[str, Any]:
    """Make the previous champion, or another former one, champion again.

    Args:
        model: Registered model.
        to: Version of the former champion; if empty, the one that the current champion replaced.
        reason: Why.
    """
    with secrets_kept():
        move = roll_back(model, to, reason, link=lasting_url(flow_run.ui_url))
    get_run_logger().info("%s: version %s is champion again: %s", model, move.champion, move.reason)
    _show(model, "rollback", f"**{model}: version {move.champion} is champion again**\n\n{move.reason}")
    return vars(move)


def _show(model: str, what: str, text: str) -> None:
    """Show the outcome on the run's page in the Prefect UI; a failure to do so is only logged."""
    try:
        create_markdown_artifact(text, key=artifact_key(model, what), description=what.capitalize())
    except Exception as error:
        get_run_logger().warning("an artifact could not be written: %s", error)
