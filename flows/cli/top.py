"""`starling top`: watch a training, on this machine or through its coordinator."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import JsonOption, friendly, out, print_json
from flows.cli.configs import complete_path
from flows.cli.node import KEY_FILE

if TYPE_CHECKING:
    from tasks.tracking.training_lookup import WatchedTraining


@friendly
def top(
    target: Annotated[
        str,
        typer.Argument(
            help="Training's folder, name or key, a data folder, or a coordinator's HOST:PORT. Default: data folder.",
            show_default=False,
        ),
    ] = "",
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", help=f"The ring's key, for HOST:PORT. Default: {KEY_FILE}.", autocompletion=complete_path
        ),
    ] = None,
    every: Annotated[float, typer.Option("--every", min=0.1, max=60, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Show a training while it runs: learners, steps/s, loss, staleness, exchanges, leases, joins, losses, time left.

    Changes nothing, and exits when the training ends. With --json, prints one JSON object per update.
    """
    from tasks.tracking.training_lookup import find_training

    if ":" in target and key_file is None and os.environ.get(KEY_FILE):
        key_file = Path(os.environ[KEY_FILE])
    watched = find_training(target, key_file)
    try:
        if once or json_output or not out.is_terminal:
            _print(watched, every, once, json_output)
        else:
            _live(watched, every)
    except KeyboardInterrupt:
        pass
    finally:
        watched.close()


def _print(watched: "WatchedTraining", every: float, once: bool, json_output: bool) -> None:
    """Print one snapshot below the other, for scripts and files."""
    from flows.cli.live_table import picture, render

    while True:
        running = watched.poll()
        shown = picture(watched) | {"running": running}
        if json_output:
            print_json(shown)
        else:
            out.print(render(shown))
        if once or not running:
            return
        time.sleep(every)


def _live(watched: "WatchedTraining", every: float) -> None:
    from rich.live import Live

    from flows.cli.live_table import picture, render

    running = watched.poll()
    with Live(render(picture(watched)), console=out, auto_refresh=False) as live:
        while running:
            time.sleep(every)
            running = watched.poll()
            live.update(render(picture(watched)), refresh=True)
