"""`starling promote` and `starling rollback`: who is champion in the model registry."""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import JsonOption, err, friendly, interruptible, out, print_json

PlainOption = Annotated[bool, typer.Option("--plain", help="Without Prefect, even if its server runs.")]
NameArgument = Annotated[str, typer.Argument(help="Registered model, such as starling-demo.", show_default=False)]


@friendly
def promote(
    name: Annotated[
        str, typer.Argument(help="Registered model; by default the configuration's.", show_default=False)
    ] = "",
    version: Annotated[str, typer.Option("--version", "-v", help="Version; by default the challenger.")] = "",
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML configuration that names the model.")
    ] = None,
    new_tests: Annotated[
        bool, typer.Option("--new-tests", help="Judge both on the version's own test sets, and freeze these.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Promote regardless of the comparison; needs --reason.")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the version.")] = "",
    plain: PlainOption = False,
    json_output: JsonOption = False,
) -> None:
    """Compare a version with the champion on the frozen test sets; make it champion if it wins.

    The exit status is 0 whichever wins, and 1 if the two could not be compared.
    """
    with redirect_stdout(sys.stderr):
        found = _promote(_model_name(name, config), version, new_tests, force, reason, plain)
    if json_output:
        print_json(found)
        return
    title = "[green]champion[/green]" if found["promoted"] else "[yellow]not promoted[/yellow]"
    out.print(f"{found['model']} version {found['version']}: {title}", highlight=False)
    out.print(f"  {found['reason']}", highlight=False, markup=False, soft_wrap=True)


def _model_name(name: str, config: Path | None) -> str:
    if name:
        return name
    if config is None:
        raise ValueError("say which model: its name in the registry, or --config FILE")
    from tasks.config import load_config

    return load_config(config).model_name


def _promote(name: str, version: str, new_tests: bool, force: bool, reason: str, plain: bool) -> dict[str, Any]:
    """As a flow if a Prefect server runs, which then shows it and tells others of it; else right here."""
    from flows.prefect_api import orchestration
    from flows.services import connect_mlflow

    if not plain and _served():
        with interruptible(), orchestration():
            from flows.promote import promote as as_flow

            found: dict[str, Any] = as_flow(
                model=name, version=version, new_tests=new_tests, force=force, reason=reason
            )
            return found
    from tasks.judging import Wish
    from tasks.promotion import promote_version

    connect_mlflow()
    return promote_version(name, version, Wish(force=force, new_tests=new_tests, reason=reason))


def _served() -> bool:
    """Whether there is a Prefect server: the one that is configured, or that of `starling up`."""
    from flows.services import running_services

    return bool(os.environ.get("PREFECT_API_URL")) or "prefect" in running_services()


def _rollback(name: str, to: str, reason: str, plain: bool) -> dict[str, Any]:
    """As a flow if a Prefect server runs, so that promotions on other machines wait; else right here."""
    from flows.prefect_api import orchestration
    from flows.services import connect_mlflow

    if not plain and _served():
        with interruptible(), orchestration():
            from flows.promote import rollback as as_flow

            moved: dict[str, Any] = as_flow(model=name, to=to, reason=reason)
            return moved
    from tasks.registry import rollback

    connect_mlflow()
    return vars(rollback(name, to, reason))


@friendly
def rollback(
    name: NameArgument,
    to: Annotated[str, typer.Option("--to", help="A former champion's version; by default the one before.")] = "",
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the version that loses the title.")] = "",
    listing: Annotated[
        bool, typer.Option("--list", help="Show the versions and their history; change nothing.")
    ] = False,
    plain: PlainOption = False,
    json_output: JsonOption = False,
) -> None:
    """Give the title back to the champion before."""
    if listing:
        from flows.services import connect_mlflow
        from tasks.registry import history
        from tasks.tracking import client

        connect_mlflow()
        _show_history(name, history(client(), name), json_output)
        return
    with redirect_stdout(sys.stderr):
        move = _rollback(name, to, reason, plain)
    if json_output:
        print_json(move)
        return
    said = f"{name}: version {move['champion']} is [green]champion[/green] again, not {move['replaced']}"
    out.print(said, highlight=False)


def _show_history(name: str, versions: list[dict[str, Any]], json_output: bool) -> None:
    if json_output:
        print_json({"model": name, "versions": versions})
        return
    if not versions:
        err.print(f"the registry has no model {name}", highlight=False)
        raise typer.Exit(1)
    from rich.table import Table

    table = Table(header_style="bold")
    for head in ("version", "aliases", "champion since", "replaced", "decision"):
        table.add_column(head)
    for entry in versions:
        aliases = " ".join(f"@{alias}" for alias in entry["aliases"])
        fate = f"rolled back: {entry['rolled_back']}" if entry["rolled_back"] else entry["decision"]
        table.add_row(entry["version"], aliases, entry["champion_since"], entry["replaced"], fate)
    out.print(table)
