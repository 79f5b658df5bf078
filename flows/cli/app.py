"""The `starling` command."""

import os
import warnings
from typing import Annotated

import typer

# before the import of libraries that read them
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
# Prefect's logs go to its server; the terminal shows an error as one message, without its traceback
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
# Prefect's internal queues log an error for each item while the server is unreachable
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL", "CRITICAL")
warnings.filterwarnings("ignore", category=UserWarning)

from devices.compute_threads import limit_libraries

limit_libraries()

from flows.cli import (
    align,
    backup,
    config,
    corpus,
    deploy,
    doctor,
    evaluate,
    export,
    init,
    lexicon,
    listing,
    monitor,
    node,
    plan,
    promote,
    run,
    score,
    search,
    serve,
    simulate,
    storage,
    top,
    transcribe,
    up,
)
from flows.cli.commands import CommandGroup
from flows.cli.early_interrupt import imported
from flows.cli.exit_status import leaving
from flows.cli.output import guarded_output
from flows.servers import services
from starling import __version__

app = CommandGroup(
    "Speech recognition, from a corpus to a champion in the model registry.",
    name="starling",
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"starling {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Speech recognition, from a corpus to a champion in the model registry."""


app.command("init")(init.init)
app.command("run", help=run.HELP)(run.run)
_ANY_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}
for stage in run.FORMER:
    app.command(stage, hidden=True, context_settings=_ANY_WORDS)(run.former_command(stage))
app.command("train", context_settings=_ANY_WORDS)(node.train)
app.command("key")(node.key)
app.command("score", context_settings={"ignore_unknown_options": True})(score.score)
app.command("evaluate")(evaluate.evaluate)
app.command("align")(align.align)
corpus.app.command("changed")(deploy.corpus_changed)
app.add_typer(config.app, name="config")
app.add_typer(corpus.app, name="corpus")
app.add_typer(lexicon.app, name="lexicon")
app.add_typer(search.app, name="search")
app.add_typer(storage.app, name="storage")
app.command("models")(listing.models)
app.command("runs")(listing.runs)
app.command("promote")(promote.promote)
app.command("rollback")(promote.rollback)
app.command("transcribe")(transcribe.transcribe)
app.command("serve")(serve.serve)
app.command("monitor")(monitor.monitor)
app.command("export")(export.export)
app.command("top")(top.top)
app.command("simulate")(simulate.simulate)
app.command("plan")(plan.plan)
app.command("up")(up.up)
app.command("secrets")(up.secrets)
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
app.command("deploy")(deploy.deploy)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Entry point of the console script."""
    imported()
    with leaving(), guarded_output():
        services.export_credentials()
        app()


if __name__ == "__main__":
    main()
