"""The `starling` command."""

import os
import warnings

import typer

# before any library is imported that reads them
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
# Prefect's logs go to its server, not to the terminal: there an error is one message, without its traceback
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
warnings.filterwarnings("ignore", category=UserWarning)

from flows.cli import corpus, doctor, node, run, score, serve, storage, transcribe

app = typer.Typer(
    name="starling",
    help="Speech recognition, from a corpus to a champion in the model registry.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)
app.command("run")(run.run)
for stage in ("shard", "features", "decode", "register"):
    app.command(stage, help=run.STAGE_HELP[stage])(run.stage_command(stage))
app.command("train")(node.train)
app.command("key")(node.key)
app.command("score")(score.score)
app.add_typer(corpus.app, name="corpus")
app.add_typer(storage.app, name="storage")
app.command("transcribe")(transcribe.transcribe)
app.command("up")(serve.up)
app.command("deploy")(serve.deploy)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
