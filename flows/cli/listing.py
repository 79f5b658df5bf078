"""`starling models` and `starling runs`: what is registered, and what has been run, with error rates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from flows.cli.common import JsonOption, friendly, local_time, print_json, say
from flows.cli.tables import print_table
from tasks.figures import brief, clock, percent

if TYPE_CHECKING:
    from tasks.tracking.listing import RegisteredVersion, TrackedRun

Row = TypeVar("Row")
_LESS_IMPORTANT = ("decision", "training", "registered", "logged")
"""Columns that are left out, in this order, if the terminal is too narrow."""


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
        print_json({"registry": shown_mlflow_uri(), "versions": [asdict(version) for version in versions]})
        return
    if not versions:
        say(f"the registry at {shown_mlflow_uri()} has no model yet: `starling run demo` registers one")
        return
    _print_table(versions, _VERSION_COLUMNS)


@friendly
def runs(
    name: Annotated[str, typer.Argument(help="Show the runs of this configuration only, by its `name`.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Number of runs.")] = 20,
    json_output: JsonOption = False,
) -> None:
    """List the last runs: status, when MLflow first heard of them, time of training, word error rates, decision.

    The time of training does not include pauses of a training that was resumed, nor the other stages.
    """
    from tasks.config.home import shown_mlflow_uri
    from tasks.tracking.listing import list_runs

    tracked = list_runs(_connected(), name, limit)
    if json_output:
        print_json({"tracking": shown_mlflow_uri(), "runs": [asdict(run) for run in tracked]})
        return
    if not tracked:
        say(f"MLflow at {shown_mlflow_uri()} has no run{f' of {name}' if name else ''} yet: `starling run` makes one")
        return
    _print_table(tracked, _RUN_COLUMNS)


def _print_table(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> None:
    print_table({head: [cell(row) for row in rows] for head, cell in columns.items()}, _LESS_IMPORTANT)


def _rates(wer: dict[str, float]) -> str:
    return "\n".join(f"{name} {percent(rate)}" for name, rate in wer.items())


_VERSION_COLUMNS: dict[str, Callable[["RegisteredVersion"], str]] = {
    "model": lambda version: version.model,
    "version": lambda version: version.version,
    "aliases": lambda version: " ".join(f"@{alias}" for alias in version.aliases),
    "WER": lambda version: _rates(version.wer),
    "registered": lambda version: local_time(version.registered),
    "decision": lambda version: brief(version.decision),
}
_RUN_COLUMNS: dict[str, Callable[["TrackedRun"], str]] = {
    "run": lambda run: run.name,
    "status": lambda run: run.status,
    "logged": lambda run: local_time(run.logged),
    "training": lambda run: clock(run.training_seconds),
    "WER": lambda run: _rates(run.wer),
    "decision": lambda run: brief(run.decision),
}
