"""`starling promote` and `starling rollback`: change the champion in the model registry."""

import os
import sys
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import JsonOption, friendly, interruptible, local_time, out, print_json, print_line
from flows.cli.configs import complete_config, find_config

NoPrefectOption = Annotated[
    bool, typer.Option("--no-prefect", help="Run without Prefect, even if its server is running.")
]
NameArgument = Annotated[str, typer.Argument(help="Registered model, such as starling-demo.", show_default=False)]


@friendly
def promote(
    name: Annotated[
        str, typer.Argument(help="Registered model. Default: the configuration's.", show_default=False)
    ] = "",
    version: Annotated[str, typer.Option("--version", "-v", help="Version. Default: the challenger.")] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="YAML configuration that names the model.",
            callback=find_config,
            autocompletion=complete_config,
        ),
    ] = None,
    new_tests: Annotated[
        bool, typer.Option("--new-tests", help="Compare both on the version's own test sets, and freeze these.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Promote regardless of the comparison; needs --reason.")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; stored with the version.")] = "",
    no_prefect: NoPrefectOption = False,
    json_output: JsonOption = False,
) -> None:
    """Compare a version with the champion on the frozen test sets; make it champion if it wins.

    The exit status is 0 if they were compared, whatever the result, and 1 if they cannot be.
    """
    with redirect_stdout(sys.stderr):
        outcome = _promote(_model_name(name, config), version, new_tests, force, reason, no_prefect)
    if json_output:
        print_json(outcome)
        return
    title = "[green]champion[/green]" if outcome["promoted"] else "[yellow]not promoted[/yellow]"
    out.print(f"{outcome['model']} version {outcome['version']}: {title}", highlight=False)
    print_line(f"  {outcome['reason']}")


def _model_name(name: str, config: Path | None) -> str:
    if name:
        return name
    if config is None:
        raise ValueError("no model given: name it as in the registry, or give --config FILE")
    from tasks.config.pipeline import load_config

    return load_config(config).model_name


def _promote(name: str, version: str, new_tests: bool, force: bool, reason: str, no_prefect: bool) -> dict[str, Any]:
    """Promote in a flow run if there is a Prefect server, which then shows it and notifies; else in this process."""
    from flows.servers.prefect_api import orchestration
    from flows.servers.services import connect_mlflow

    if not no_prefect and prefect_runs():
        with interruptible(), orchestration():
            from flows.promote import promote as as_flow

            outcome: dict[str, Any] = as_flow(
                model=name, version=version, new_tests=new_tests, force=force, reason=reason
            )
            return outcome
    from tasks.tracking.promotion import promote_version
    from tasks.tracking.significance import PromotionOptions

    connect_mlflow()
    return promote_version(name, version, PromotionOptions(force=force, new_tests=new_tests, reason=reason))


def prefect_runs() -> bool:
    """Whether there is a Prefect server: a configured one, or that of `starling up`."""
    from flows.servers.services import running_services

    return bool(os.environ.get("PREFECT_API_URL")) or "prefect" in running_services()


def _rollback(name: str, to: str, reason: str, no_prefect: bool) -> dict[str, Any]:
    """Roll back in a flow run if there is a Prefect server, so that other machines' promotions wait; else here."""
    from flows.servers.prefect_api import orchestration
    from flows.servers.services import connect_mlflow

    if not no_prefect and prefect_runs():
        with interruptible(), orchestration():
            from flows.promote import rollback as as_flow

            moved: dict[str, Any] = as_flow(model=name, to=to, reason=reason)
            return moved
    from tasks.tracking.registry import rollback

    connect_mlflow()
    return vars(rollback(name, to, reason))


@friendly
def rollback(
    name: NameArgument,
    to: Annotated[str, typer.Option("--to", help="Version of a former champion. Default: the previous one.")] = "",
    reason: Annotated[str, typer.Option("--reason", help="Why; stored with the version that is replaced.")] = "",
    listing: Annotated[
        bool, typer.Option("--list", help="Show the versions and their history; change nothing.")
    ] = False,
    no_prefect: NoPrefectOption = False,
    json_output: JsonOption = False,
) -> None:
    """Make the previous champion champion again."""
    if listing:
        from flows.servers.services import connect_mlflow
        from tasks.tracking.registry import history
        from tasks.tracking.runs import client

        connect_mlflow()
        _show_history(name, history(client(), name), json_output)
        return
    with redirect_stdout(sys.stderr):
        move = _rollback(name, to, reason, no_prefect)
    if json_output:
        print_json(move)
        return
    message = f"{name}: version {move['champion']} is [green]champion[/green] again, not {move['replaced']}"
    out.print(message, highlight=False)


def _show_history(name: str, versions: list[dict[str, Any]], json_output: bool) -> None:
    if json_output:
        print_json({"model": name, "versions": versions})
        return
    from rich.table import Table

    table = Table(header_style="bold")
    for head in ("version", "aliases", "champion since", "replaced", "decision"):
        table.add_column(head)
    for entry in versions:
        aliases = " ".join(f"@{alias}" for alias in entry["aliases"])
        fate = f"rolled back: {entry['rolled_back']}" if entry["rolled_back"] else entry["decision"]
        table.add_row(entry["version"], aliases, _tag_time(entry["champion_since"]), entry["replaced"], fate)
    out.print(table)


def _tag_time(tag: str | None) -> str:
    """The time in a version's tag, as the other tables show it; anything else unchanged."""
    try:
        return local_time(datetime.fromisoformat(tag or ""))
    except ValueError:
        return tag or ""
