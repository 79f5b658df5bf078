"""`starling models` and `starling runs`: what is registered, and what has been run, with error rates."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from flows.cli.common import JsonOption, friendly, out, print_json, say


def _connected() -> Any:
    """The client of the configured MLflow, or of the one that `starling up` runs."""
    from flows.servers.services import connect_mlflow
    from tasks.tracking.runs import client

    connect_mlflow()
    return client()


@friendly
def models(
    name: Annotated[
        str, typer.Argument(help="Show all versions of this model. Default: the named versions of all models.")
    ] = "",
    json_output: JsonOption = False,
) -> None:
    """List the registered models: versions, aliases (champion, challenger), word error rates."""
    from tasks.config.home import shown_mlflow_uri
    from tasks.tracking.listing import list_versions

    versions = list_versions(_connected(), name)
    if json_output:
        print_json({"registry": shown_mlflow_uri(), "versions": [asdict(one) for one in versions]})
        return
    if not versions:
        say(f"the registry at {shown_mlflow_uri()} has no model yet: `starling run demo` registers one")
        return
    table = Table("model", "version", "aliases", "WER", "registered", "decision", header_style="bold")
    for one in versions:
        aliases = " ".join(f"@{alias}" for alias in one.aliases)
        table.add_row(one.model, one.version, aliases, _rates(one.wer), _day(one.registered), one.decision)
    out.print(table)


@friendly
def runs(
    name: Annotated[str, typer.Argument(help="Show the runs of this configuration only, by its `name`.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Number of runs.")] = 20,
    json_output: JsonOption = False,
) -> None:
    """List the last runs: status, start, duration, word error rates, and what became of the model."""
    from tasks.config.home import shown_mlflow_uri
    from tasks.tracking.listing import list_runs
    from tasks.tracking.training_view import clock

    found = list_runs(_connected(), name, limit)
    if json_output:
        print_json({"tracking": shown_mlflow_uri(), "runs": [asdict(one) for one in found]})
        return
    if not found:
        say(f"MLflow at {shown_mlflow_uri()} has no run{f' of {name}' if name else ''} yet: `starling run` makes one")
        return
    table = Table("run", "status", "started", "time", "WER", "decision", header_style="bold")
    for one in found:
        table.add_row(one.name, one.status, _day(one.started), clock(one.seconds), _rates(one.wer), one.decision)
    out.print(table)


def _rates(wer: dict[str, float]) -> str:
    return "\n".join(f"{name} {rate:.2%}" for name, rate in wer.items())


def _day(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M}"
