"""`starling monitor`: compares what servers have recognized with the test sets of the model."""

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import JsonOption, friendly, interruptible, print_json, print_line
from flows.cli.configs import complete_config, complete_path, find_config
from flows.cli.promote import NoPrefectOption, prefect_runs

if TYPE_CHECKING:
    from tasks.config.pipeline import MonitorConfig
    from tasks.tracking.monitoring import MonitorReport

CHANGED = 3
"""Exit status if recognition is not as on the test sets."""


@friendly
def monitor(
    name: Annotated[
        str, typer.Argument(help="Registered model. Default: the configuration's.", show_default=False)
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="YAML configuration that names the model; its section monitor has the logs and what counts.",
            callback=find_config,
            autocompletion=complete_config,
        ),
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(
            "--log",
            help="Log of a server, or a folder with logs; repeatable. Default: logs in the data folder.",
            autocompletion=complete_path,
        ),
    ] = None,
    hours: Annotated[
        float | None, typer.Option("--hours", help="Length of the period that is compared. [default: 24]")
    ] = None,
    no_prefect: NoPrefectOption = False,
    json_output: JsonOption = False,
) -> None:
    """Compare confidences, lengths, words per second and rejected inputs of servers with the test sets.

    The exit status is 3 if they differ, which is also an event; 0 if they do not, or if there are too few; else 1.
    """
    from tasks.config.pipeline import load_config
    from tasks.tracking.monitoring import monitored

    loaded = load_config(config) if config is not None else None
    with redirect_stdout(sys.stderr):
        model, settings = monitored(loaded, name, None)
        report = _report(model, _changed(settings, log, hours), no_prefect)
    if json_output:
        print_json(asdict(report))
    else:
        _print(report)
    if report.outcome == "Changed":
        raise typer.Exit(CHANGED)


def _changed(settings: "MonitorConfig", log: list[Path] | None, hours: float | None) -> "MonitorConfig":
    """The settings with those of the command line.

    Raises:
        ValueError: A log is not there.
    """
    if missing := [path for path in log or () if not path.exists()]:
        raise ValueError(f"--log {missing[0]} is not there: give the log of a server, or the folder with its logs")
    given = {"logs": tuple(map(str, log)) if log else None, "hours": hours}
    return type(settings)(**(dict(settings) | {key: value for key, value in given.items() if value is not None}))


def _report(model: str, settings: "MonitorConfig", no_prefect: bool) -> "MonitorReport":
    """Compare in this process; the event goes to a Prefect server if there is one."""
    from flows.servers.services import connect_mlflow
    from tasks.tracking.monitoring import monitor_model

    connect_mlflow()
    if not no_prefect and prefect_runs():
        from flows.servers.prefect_api import orchestration

        with interruptible(), orchestration():
            return monitor_model(model, settings)
    return monitor_model(model, settings)


def _print(report: "MonitorReport") -> None:
    from rich.table import Table

    from flows.cli.common import out

    print_line(report.message)
    if report.comparisons:
        table = Table(
            "measure", "served", "median", "tested", "median", "distance", "p", "changed", header_style="bold"
        )
        for entry in report.comparisons:
            numbers = (entry.served, f"{entry.served_middle:.3g}", entry.tested, f"{entry.tested_middle:.3g}")
            distance, p_value = f"{entry.distance:.2f}", f"{entry.p_value:.3f}"
            table.add_row(entry.measure, *map(str, numbers), distance, p_value, "yes" if entry.changed else "no")
        out.print(table)
    if report.hours:
        table = Table("hour (UTC)", "utterances", "seconds", "confidence", "words/s", "inputs", "rejected")
        for hour in report.hours:
            names = ("hour", "utterances", "seconds", "confidence", "words_per_second", "inputs", "rejected")
            table.add_row(*(str(hour[name]) for name in names))
        out.print(table)
    if report.unreadable:
        print_line(f"{report.unreadable:,} damaged lines of the logs were left out")
