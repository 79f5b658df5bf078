"""The flows `promote` and `rollback`: a registered version against the champion, on demand, and the way back."""

from collections.abc import Callable
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from tasks.artifacts import artifact_key
from tasks.config import PipelineConfig
from tasks.judging import Wish
from tasks.logs import secrets_kept
from tasks.promotion import promote_version
from tasks.registry import RegistryError, record_links
from tasks.registry import rollback as roll_back


def _named(what: str) -> Callable[[], str]:
    """Names a run by the model that it is about."""

    def name() -> str:
        given = flow_run.parameters
        return f"{what} {given.get('model') or getattr(given.get('config'), 'model_name', '')}".strip()

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
        version: The version; empty is the waiting challenger.
        force: Promote regardless of the comparison; needs a reason.
        new_tests: Judge on the version's own test sets even if they are not the frozen ones, and freeze them.
        reason: Why.
    """
    name = model or (config.model_name if config is not None else "")
    if not name:
        raise RegistryError("say which model: give `model` its name in the registry, or a configuration")
    wish = Wish(force=force, new_tests=new_tests, reason=reason)
    with secrets_kept():
        found = promote_version(name, version, wish, link=str(flow_run.ui_url or ""))
    get_run_logger().info("%s version %s: %s", name, found["version"], found["reason"])
    links = " · ".join(f"[{text}]({address})" for text, address in record_links(found).items())
    title = "promoted" if found["promoted"] else "not promoted"
    _show(name, "promotion", f"**{name} version {found['version']}: {title}**\n\n{found['reason']}\n\n{links}")
    return found


@flow(name="rollback", flow_run_name=_named("rollback"), persist_result=False)
def rollback(model: str, to: str = "", reason: str = "") -> dict[str, Any]:
    """Give the title back to the champion before the present one, or to a former champion.

    Args:
        model: Registered model.
        to: Version of the former champion; empty is the one that the present champion replaced.
        reason: Why.
    """
    with secrets_kept():
        move = roll_back(model, to, reason, link=str(flow_run.ui_url or ""))
    get_run_logger().info("%s: version %s is champion again: %s", model, move.champion, move.reason)
    _show(model, "rollback", f"**{model}: version {move.champion} is champion again**\n\n{move.reason}")
    return vars(move)


def _show(model: str, what: str, text: str) -> None:
    """What happened on the run's page in the Prefect UI; trouble there changes nothing about it."""
    try:
        create_markdown_artifact(text, key=artifact_key(model, what), description=what.capitalize())
    except Exception as error:
        get_run_logger().warning("an artifact could not be written: %s", error)
