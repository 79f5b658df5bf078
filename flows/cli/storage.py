"""`starling storage`: verify stored objects, delete garbage, show what takes the space."""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from flows.cli.commands import CommandGroup
from flows.cli.common import JsonOption, friendly, out, print_json, print_line, progress_bars
from flows.cli.configs import complete_config, find_config
from storage.disks import size_text

app = CommandGroup("Verify, clean and measure an object store.")

UrlOption = Annotated[
    str, typer.Option("--url", help="Object store. Default: the configuration's, or that of the data folder.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Configuration whose `storage` gives the store and credentials.",
        callback=find_config,
        autocompletion=complete_config,
    ),
]


def _open(url: str, config: Path | None) -> Any:
    from storage.objects import ObjectStore
    from tasks.config.credentials import export_credentials
    from tasks.config.home import objects_url
    from tasks.config.pipeline import load_config

    if config is not None:
        storage = load_config(config).storage
        export_credentials(storage)
        url = url or storage.url
    return ObjectStore(objects_url(url))


def _not_empty(store: Any, contents: object) -> None:
    """Reject a store without any output: usually its URL is wrong, so a check of it must not pass.

    Raises:
        ObjectMissingError: If nothing was found.
    """
    from storage.objects import ObjectMissingError

    if not contents:
        raise ObjectMissingError(
            f"{store.url} holds no output of any stage: check bucket and prefix, or run a pipeline first"
        )


@app.command("verify")
@friendly
def verify(
    url: UrlOption = "",
    config: ConfigOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compare sizes only; read no shard.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete damaged objects, so that the next run recreates them.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Check shards against their indexes and other objects against their stage's record; exit status 1 on damage.

    With --repair the status is 1 only if something could not be repaired.
    """
    from storage.audit import Repair
    from storage.audit import verify as run_verify
    from tasks.stages import progress
    from tasks.stages.housekeeping import repair_problems

    store = _open(url, config)
    with progress_bars():
        report = run_verify(store, quick=quick, on_progress=lambda a, b: progress.report("verify", a, b, "objects"))
    _not_empty(store, report.indexes or report.objects or report.problems)
    repaired = repair_problems(store, report.problems) if repair else Repair(left=report.problems)
    if json_output:
        done = {"repaired": asdict(repaired)} if repair else {}
        print_json({"store": store.url, "ok": not report.problems, **asdict(report), **done})
    else:
        _print_verified(store, report, repaired, repair)
    if repaired.left:
        raise typer.Exit(1)


def _print_verified(store: Any, report: Any, repaired: Any, repair: bool) -> None:
    for problem in report.problems:
        print_line(f"{store.join(problem.object)}: {problem.reason}", "red")
    text = f"{report.shards:,} shards ({size_text(report.bytes)}) of {report.indexes:,} indexes"
    text += f" and {report.objects:,} other objects"
    if not report.problems:
        print_line(f"{text}: all intact")
        return
    problems = f"{len(report.problems):,} problem{'s' if len(report.problems) > 1 else ''}"
    print_line(f"{text}: {problems}")
    if not repair:
        print_line(
            f"`starling storage verify --repair --url {store.url}` deletes damaged objects and their stages' records; "
            "then run the pipelines again, which recreate only these"
        )
        return
    for problem in repaired.left:
        print_line(f"{store.join(problem.object)}: not repaired: {problem.reason}", "red")
    if repaired.outputs:
        print_line(f"deleted: {len(repaired.deleted):,} objects and the records of {', '.join(repaired.outputs)}")
        print_line("Run their pipelines again with the same commands: they recreate only what was deleted.")


@app.command("gc")
@friendly
def collect_garbage(
    url: UrlOption = "",
    config: ConfigOption = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete. Without it, only show what would be deleted.")
    ] = False,
    unregistered: Annotated[
        bool, typer.Option("--unregistered", help="Also finished outputs that no registered model was made from.")
    ] = False,
    min_age: Annotated[
        float, typer.Option("--min-age", min=0, help="Keep what was changed or used within this many hours.")
    ] = 72.0,
    json_output: JsonOption = False,
) -> None:
    """Delete remains of killed stages, shards without an index and, on request, outputs without a registered model."""
    from tasks.stages.housekeeping import delete_garbage, find_garbage

    store = _open(url, config)
    plan = find_garbage(store, min_age * 3600.0, unregistered)
    deleted = delete_garbage(store, plan.garbage) if delete else []
    if json_output:
        shown = {"garbage": [asdict(entry) for entry in plan.garbage], "kept": plan.kept, "bytes": plan.bytes}
        print_json({"store": store.url, **shown, "deleted": [entry.name for entry in deleted]})
        return
    _print_garbage(plan.garbage)
    if not plan.garbage:
        out.print("nothing to delete")
    elif not delete:
        out.print(f"{size_text(plan.bytes)} could be freed; nothing was deleted: add --delete to do so")
    else:
        out.print(f"{size_text(sum(entry.bytes for entry in deleted))} freed; {len(plan.kept):,} outputs stay")


def _print_garbage(garbage: list[Any]) -> None:
    table = Table("output", "size", "why", header_style="bold")
    for entry in garbage:
        table.add_row(entry.name, size_text(entry.bytes), entry.why)
    if garbage:
        out.print(table)


@app.command("du")
@friendly
def usage(url: UrlOption = "", config: ConfigOption = None, json_output: JsonOption = False) -> None:
    """Show how much space each stage and each of its outputs takes."""
    from storage.audit import usage as measure

    store = _open(url, config)
    outputs = measure(store)
    _not_empty(store, outputs or not (url or config))  # the data folder is empty before the first run
    stages: dict[str, int] = {}
    for output in outputs:
        stages[output.stage] = stages.get(output.stage, 0) + output.bytes
    rows = [
        {
            **{name: getattr(o, name) for name in ("stage", "key", "bytes", "published")},
            "objects": len(o.objects),
            "modified": datetime.fromtimestamp(o.modified, UTC).isoformat(timespec="seconds"),
        }
        for o in outputs
    ]
    total = sum(stages.values())
    if json_output:
        print_json({"store": store.url, "bytes": total, "stages": stages, "outputs": rows})
        return
    table = Table("output", "size", "objects", "state", "last change", title=store.url, header_style="bold")
    for row in rows:
        state = "finished" if row["published"] else "unfinished"
        cells = (f"{row['objects']:,}", state, str(row["modified"]))
        table.add_row(f"{row['stage']}/{row['key']}", size_text(row["bytes"]), *cells)
    out.print(table)
    out.print(", ".join(f"{stage} {size_text(size)}" for stage, size in stages.items()), f"– total {size_text(total)}")
