"""`starling run`, and what stands for former commands that stopped after one stage."""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flows.cli.common import (
    JsonOption,
    SetOption,
    err,
    friendly,
    interruptible,
    on_prefect,
    out,
    print_json,
    progress_bars,
    run_log,
)
from flows.cli.configs import ConfigArgument
from tasks import STAGES

if TYPE_CHECKING:
    from tasks.config.pipeline import PipelineConfig

FORMER = ("shard", "features", "decode", "register")
"""Stages that were commands, too."""
HELP = f"""Run a pipeline, or the part of it up to a stage.

Stages, as far as the configuration has them: {", ".join(STAGES)}.

Stages whose inputs and configuration have not changed are taken from the object store.
"""

NoPrefectOption = Annotated[bool, typer.Option("--no-prefect", help="Run the stages without Prefect.")]


def _stage(value: str | None) -> str | None:
    if value is not None and value not in STAGES:
        near = get_close_matches(value, STAGES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise typer.BadParameter(f"{value!r} is not a stage; {hint}stages are: {', '.join(STAGES)}")
    return value


def _beginning(values: list[str] | None) -> tuple[str, str]:
    """The stage and the model that `--from` names, each at most once."""
    stages = [value for value in values or [] if value in STAGES]
    models = [value for value in values or [] if value not in STAGES]
    if len(stages) > 1 or len(models) > 1:
        raise typer.BadParameter("--from names a stage, a model, or one of each", param_hint="--from")
    model = models[0] if models else ""
    if re.fullmatch(r"[a-z_]+", model) and not Path(model).is_dir():
        _stage(model)
    return stages[0] if stages else "", model


@friendly
def run(
    config: ConfigArgument,
    overrides: SetOption = None,
    beginning: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="STAGE|MODEL",
            help="Run this stage and all later ones again; or begin training with a model: @champion, NAME@ALIAS, "
            "NAME/VERSION, the folder or URL of a bundle or pretrained model. Repeatable.",
        ),
    ] = None,
    until: Annotated[
        str, typer.Option("--until", metavar="STAGE", callback=_stage, help="Stop after this stage.")
    ] = "report",
    folds: Annotated[
        int, typer.Option("--folds", metavar="K", help="Cross-validate: train and score K folds, register nothing.")
    ] = 0,
    no_prefect: NoPrefectOption = False,
    json_output: JsonOption = False,
) -> None:
    """Run a pipeline, or the part of it up to a stage; the help is `HELP`."""
    from tasks.config.model_names import initial_overrides

    from_stage, model = _beginning(beginning)
    overrides = [*(overrides or []), *initial_overrides(model)]
    if from_stage and STAGES.index(from_stage) > STAGES.index(until):
        raise typer.BadParameter(f"--from {from_stage} comes after --until {until}: nothing would run again")
    if folds:
        if until != "report":
            raise typer.BadParameter("--until and --folds exclude each other: every fold runs through `score`")
        finish_folds(execute_folds(config, overrides, folds, from_stage, no_prefect), json_output)
        return
    summary = execute(config, overrides, from_stage, until, no_prefect)
    finish(summary, json_output)


def execute(config_path: Path, overrides: list[str], force_from: str, until: str, no_prefect: bool) -> dict[str, Any]:
    """Run a configuration and return its summary; output of libraries goes to standard error."""
    with redirect_stdout(sys.stderr), interruptible():
        config = _open(config_path, overrides, until)
        with run_log(config.name) as log:
            return _execute(config, force_from, until, no_prefect) | {"log": str(log)}


def _say(text: str) -> None:
    err.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def _open(config_path: Path, overrides: list[str], until: str) -> "PipelineConfig":
    """A configuration whose sources and servers can be reached."""
    from tasks.config.pipeline import load_config
    from tasks.orchestration.reachable import check_servers
    from tasks.stages.sources import check_sources_open

    config = load_config(config_path, overrides)
    check_sources_open(config, str(config_path))
    check_servers(config, until, _say)
    return config


def _execute(config: "PipelineConfig", force_from: str, until: str, no_prefect: bool) -> dict[str, Any]:
    if no_prefect:
        from flows.plain import run_pipeline

        with progress_bars():
            return run_pipeline(config, force_from, until)
    with on_prefect(_say):
        from prefect import tags

        from flows.names import TAG
        from flows.pipeline import pipeline

        with tags(TAG):
            flow: Any = pipeline  # a flow's types omit what it returns
            summary: dict[str, Any] = flow(config, force_from=force_from, until=until)
    return summary


def execute_folds(
    config_path: Path, overrides: list[str], folds: int, force_from: str, no_prefect: bool
) -> dict[str, Any]:
    """Cross-validate a configuration; output of libraries goes to standard error."""
    from tasks.config.pipeline import load_config
    from tasks.orchestration.reachable import check_servers
    from tasks.stages.folds import fold_configs
    from tasks.stages.sources import check_sources_open

    with redirect_stdout(sys.stderr), interruptible():
        config = load_config(config_path, overrides)
        check_sources_open(config, str(config_path))
        fold_configs(config, folds)  # reject an impossible number before a server is started
        check_servers(config, "register", _say, can_stop=False)  # the result is logged to MLflow
        if no_prefect:
            from flows.folds import crossvalidate_plainly

            with progress_bars():
                return crossvalidate_plainly(config, folds, force_from)
        with on_prefect(_say):
            from prefect import tags

            from flows.folds import crossvalidate
            from flows.names import TAG

            with tags(TAG):
                flow: Any = crossvalidate
                result: dict[str, Any] = flow(config, folds, force_from=force_from)
        return result


def finish_folds(result: dict[str, Any], json_output: bool) -> None:
    """Print a cross-validation's outcome."""
    from flows.folds import print_folds

    print_folds(result, err if json_output else out)
    if json_output:
        print_json(result)


def finish(summary: dict[str, Any], json_output: bool) -> None:
    """Print a run's outcome, or, with JSON on standard output, on standard error; all tables go to the run's log."""
    from flows.summary import print_outcome, print_summary

    with Path(summary["log"]).open("a", encoding="utf-8") as file:
        print_summary(summary, Console(file=file, width=160))
    print_outcome(summary, err if json_output else out)
    if json_output:
        print_json(summary)


def instead(stage: str, words: Sequence[str]) -> str:
    """What to write in place of a former command of a single stage.

    Args:
        stage: The stage, which had the command's name.
        words: What followed on the command line.
    """
    options = f"--from {stage} --until {stage}" if "--force" in words else f"--until {stage}"
    rest = [word for word in words if word != "--force"]
    return f"starling run {shlex.join(rest) or 'CONFIG'} {options}"


def former_command(stage: str) -> Callable[..., None]:
    """Returns the hidden command in place of the one that ran a configuration up to a stage."""

    @friendly
    def command(context: typer.Context) -> None:
        raise ValueError(f"there is no command {stage} any more: {instead(stage, context.args)}")

    command.__name__ = stage
    return command
