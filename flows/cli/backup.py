"""`starling backup` and `starling restore`: the databases of Prefect and MLflow, and MLflow's artifacts."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import JsonOption, friendly, out, print_json, print_line, say
from flows.cli.configs import complete_path


@friendly
def backup(
    to: Annotated[str, typer.Option("--to", metavar="FOLDER|s3://…", help="Folder of the backups.")],
    json_output: JsonOption = False,
) -> None:
    """Back up the databases and the registry's artifacts, without shards; the servers may be running."""
    from flows.servers import backup as work

    url, manifest = work.backup(to, say)
    _print("written", work.summary(url, manifest), json_output)


@friendly
def restore(
    source: Annotated[str, typer.Option("--from", metavar="FOLDER|s3://…", help="A backup, or a folder of several.")],
    folder: Annotated[
        Path | None,
        typer.Option(help="Data folder. Default: $STARLING_HOME.", show_default=False, autocompletion=complete_path),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite databases that have data.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Restore a backup (the newest of a folder) while the servers are stopped."""
    import os

    if folder is not None:
        os.environ["STARLING_HOME"] = str(folder.resolve())
    from flows.servers import backup as work

    url, manifest = work.restore(source, force, say)
    _print("restored", work.summary(url, manifest), json_output)


def _print(verb: str, figures: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print_json(figures)
        return
    size = f"{figures['bytes'] / 2**20:.1f} MiB"
    print_line(f"{verb}: {figures['backup']}")
    out.print(f"made {figures['created']}, {figures['artifacts']} artifacts, {size}", highlight=False)
