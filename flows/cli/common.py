"""Shared by all commands: consoles, JSON output, progress bars, errors without tracebacks."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import IO, Annotated, Any, ParamSpec, TypeVar, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

from flows.servers.shutdown import bounded_end, cause, end_if_signalled
from tasks.config.home import home, own_disks_named
from tasks.figures import percent
from tasks.orchestration.logs import LogStream
from training.processes.logs import wants_json

P = ParamSpec("P")
R = TypeVar("R")

out = Console()
# with JSON logs, messages for people go to the log, too
err = Console(file=cast(IO[str], LogStream()), width=200) if wants_json() else Console(stderr=True)

_WIDE = 130
"""Columns of a terminal in which a long bar and a clock fit beside the note of a training."""
_QUIET_S, _QUIETEST_S = 30.0, 600.0
"""Time between two lines of a running stage: it doubles with each of them, up to the second of these times."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, last on standard output.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, e.g. train.optimizer.lr=0.001. Repeatable."),
]


def print_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def print_line(text: str, style: str = "") -> None:
    """Print a line as it is on standard output: a long path is not broken, and its brackets are no markup."""
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def local_time(time: datetime) -> str:
    """A moment in the local time zone, as all tables show it."""
    return f"{time.astimezone():%Y-%m-%d %H:%M}"


def friendly(command: Callable[P, R]) -> Callable[P, R]:
    """Show an expected error as one message with its remedy and exit with status 1; others keep their traceback."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with own_disks_named():
                return command(*args, **kwargs)
        except (typer.Exit, typer.Abort):  # subclasses of RuntimeError, but not errors
            raise
        except Exception as error:
            if not _expected(error):
                raise
            err.print("[bold red]error:[/bold red]", end=" ")
            err.print(_told(error), markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from error

    return wrapped


def _told(error: Exception) -> str:
    """An error in words, without numbers and class names of the system or of pydantic."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror and str(error).startswith("[Errno"):
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if type(error).__module__.startswith("pydantic"):
        from tasks.config.mistakes import plainly

        return "; ".join(plainly(cast(Any, error)))
    return str(error) or type(error).__name__


def _expected(error: Exception) -> bool:
    """Whether an error comes from the input, the environment or a server, and not from a bug.

    Errors of servers are recognized by module name, since importing their libraries is slow.
    """
    server = type(error).__module__.partition(".")[0] in ("mlflow", "prefect", "httpx")
    return server or isinstance(error, ValueError | RuntimeError | OSError)


def say(text: str) -> None:
    """Print a message on standard error."""
    err.print(text, markup=False, highlight=False)


def say_prefect(url: str) -> None:
    """Print a Prefect server's address, and whether it answers only while the command runs."""
    from flows.servers.prefect_api import lasting_url

    until = "" if lasting_url(url) else " (until this run ends; `starling up` keeps a server)"
    err.print(f"Prefect at {url}{until}", style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def on_prefect(say: Callable[[str], None]) -> Iterator[None]:
    """Run the block's flows on a Prefect server, a running one or an own one, and show its address and progress bars.

    Args:
        say: Called with messages about the server.
    """
    from flows.servers.prefect_api import orchestration

    with orchestration(say) as url:
        say_prefect(url)
        with progress_bars(lines=not wants_json()):  # JSON logs have the lines of Prefect's tasks
            yield


@contextmanager
def interruptible() -> Iterator[None]:
    """End the block, and everything it started, within ten seconds of Ctrl-C or SIGTERM, with one line of output."""
    try:
        with bounded_end(say=_say_interrupted):
            yield
    except BaseException:
        end_if_signalled()
        raise
    end_if_signalled()  # a library that was finishing its work may have dropped the interruption


def _say_interrupted(number: int) -> None:
    err.print(f"interrupted ({cause(number)}): stopping within ten seconds; run the same command again to continue")
    err.show_cursor(True)  # progress bars hide it
    # a line that the main thread was printing when it was interrupted would follow; a terminal's bars must still go
    err.quiet = not err.is_terminal


def _bar_columns(width: int) -> list[ProgressColumn]:
    """Columns of a stage's bar; the note of a training, with its loss, speed and time left, is whole in 80 columns."""
    if width >= _WIDE:
        note = TextColumn("{task.fields[note]}")
        return [TextColumn("[bold]{task.description:9}"), BarColumn(), note, TimeElapsedColumn()]
    # the bar takes what the note leaves
    return [TextColumn("[bold]{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[note]}")]


@contextmanager
def run_log(name: str) -> Iterator[Path]:
    """Write every line of the block's stages, with its time, into a new file of the data folder.

    Args:
        name: Of the configuration; begins the file's name.

    Yields:
        The file.
    """
    from tasks.stages import progress

    path = home() / "logs" / f"run-{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", buffering=1) as file:

        def tell(stage: str, text: str) -> None:
            file.write(f"{datetime.now().astimezone():%H:%M:%S} {stage}: {text}\n")

        with progress.following(tell):
            yield path


@contextmanager
def progress_bars(lines: bool = True) -> Iterator[None]:
    """Show progress on standard error while the block runs: lines, and running stages as bars on a terminal.

    Of the lines of a running stage, such as one for each epoch, those are left out that follow another one too soon.
    Where there are no bars, a stage without lines gives one of how far it is.

    Args:
        lines: Whether to show the lines that stages announce.
    """
    from tasks.stages import progress

    with Progress(*_bar_columns(err.width), console=err, transient=True) as bars:
        shown: dict[str, TaskID] = {}
        spoke: dict[str, float] = {}  # when a running stage gave its last line, or began
        pauses: dict[str, float] = {}

        def sink(stage: str, done: float, total: float, note: str) -> None:
            if stage not in shown:
                shown[stage] = bars.add_task(stage, total=None, note="")
            text = note if total > 0 else f"{note} {done:,.0f}"
            bars.update(shown[stage], completed=done, total=total or None, note=text)
            now = time.monotonic()
            quiet = now - spoke.setdefault(stage, now) < pauses.get(stage, _QUIET_S)
            finished = 0 < total <= done  # the stage's last line follows
            if not (err.is_terminal or quiet or finished):
                # first, since a note may end in another rate
                tell(stage, f"{percent(done / total, 0)}{', ' if note else ''}{note}" if total > 0 else text)

        def tell(stage: str, text: str) -> None:
            now = time.monotonic()
            if stage in shown:
                if stage in pauses and now - spoke[stage] < pauses[stage]:
                    return
                pauses[stage] = min(2 * pauses.get(stage, _QUIET_S), _QUIETEST_S)
                spoke[stage] = now
            bars.console.print(f"{stage}: {text}", style="dim", markup=False, highlight=False, soft_wrap=True)

        def end(stage: str) -> None:
            spoke.pop(stage, None)
            pauses.pop(stage, None)
            if stage in shown:
                bars.remove_task(shown.pop(stage))

        followed = progress.following(tell) if lines else nullcontext()
        with progress.listening(sink), followed, progress.ending(end):
            yield
