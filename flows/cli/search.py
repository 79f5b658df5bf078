"""`starling search`: run a search, and see what it has found."""

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.commands import CommandGroup
from flows.cli.common import (
    JsonOption,
    SetOption,
    err,
    friendly,
    interruptible,
    on_prefect,
    out,
    print_json,
    print_line,
    progress_bars,
    run_log,
)
from flows.cli.configs import ConfigArgument
from flows.cli.run import NoPrefectOption
from flows.cli.tables import print_table

if TYPE_CHECKING:
    from tasks.search.study import Study

app = CommandGroup(
    "Search for better values of a configuration's fields: `starling search CONFIG`.", runs_by_default=True
)

StudyArgument = Annotated[str, typer.Argument(help="The study. Default: the newest one.", show_default=False)]
UrlOption = Annotated[str, typer.Option("--url", help="Database of studies. Default: $STARLING_STUDIES, or SQLite.")]


def _say(text: str) -> None:
    err.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


@app.command("run")
@friendly
def run(
    config: ConfigArgument,
    overrides: SetOption = None,
    no_prefect: NoPrefectOption = False,
    json_output: JsonOption = False,
) -> None:
    """Search as the configuration's section `search` says; the same command continues a search that was ended.

    The word `run` may be left out.
    """
    from tasks.config.pipeline import load_config
    from tasks.orchestration.reachable import check_servers
    from tasks.stages.sources import check_sources_open

    with redirect_stdout(sys.stderr), interruptible():
        loaded = load_config(config, overrides or [])
        if loaded.search is None:
            raise ValueError(f"{config} has no section search: name there the fields to search (search.space)")
        check_sources_open(loaded, str(config))
        registers = loaded.search.seeds and loaded.search.evaluate_best
        check_servers(loaded, "register" if registers else "train", _say, can_stop=False)
        with run_log(loaded.name):
            result = _run(loaded, no_prefect)
    if json_output:
        print_json(result)
    else:
        _print_result(result)


def _run(config: Any, no_prefect: bool) -> dict[str, Any]:
    if no_prefect:
        from flows.search import search_plainly

        with progress_bars():
            return search_plainly(config)
    with on_prefect(_say):
        from prefect import tags

        from flows.names import TAG
        from flows.search import search

        with tags(TAG):
            flow: Any = search  # a flow's types omit what it returns
            result: dict[str, Any] = flow(config)
    return result


def _open(study: str, url: str) -> "Study":
    from tasks.search.study import Studies, StudyError

    studies = Studies(url)
    names = [study] if study else studies.names()
    if not names:
        raise StudyError("there is no study yet: `starling search CONFIG` makes one")
    return studies.open(names[0])


@app.command("status")
@friendly
def status(study: StudyArgument = "", url: UrlOption = "", json_output: JsonOption = False) -> None:
    """Show how far a search is: trials by state, epochs, what is left, the best so far, other seeds."""
    from tasks.tracking.search_report import search_result

    result = search_result(_open(study, url))
    if json_output:
        print_json(result)
    else:
        _print_result(result)


def _print_result(result: dict[str, Any]) -> None:
    from tasks.tracking.search_report import result_lines

    for line in result_lines(result):
        print_line(line)


@app.command("best")
@friendly
def best(study: StudyArgument = "", url: UrlOption = "", json_output: JsonOption = False) -> None:
    """Print the values of the best trial as options of `starling run`."""
    import shlex

    from tasks.search.seeds import seed_spread
    from tasks.search.study import StudyError
    from tasks.tracking.search_report import value_text

    found = _open(study, url)
    trial, seeds = found.best, seed_spread(found)
    if trial is None:
        raise StudyError(f"the study {found.name} has no result yet: see `starling search show {found.name}`")
    if json_output:
        print_json({"study": found.name, **trial.to_dict(), "seeds": seeds and seeds.to_dict(found.trials)})
        return
    if seeds and seeds.mean is not None:  # not on standard output, which is for a command line
        std = f" ± {seeds.std:.4f}" if seeds.std is not None else ""
        _say(f"trial {trial.number}; with other seeds: {seeds.mean:.4f}{std}, lowest with seed {seeds.best_seed}")
    words = [f"--set {shlex.quote(f'{name}={value_text(value)}')}" for name, value in trial.values.items()]
    out.file.write(" ".join(words) + "\n")


@app.command("show")
@friendly
def show(study: StudyArgument = "", url: UrlOption = "", json_output: JsonOption = False) -> None:
    """List the trials of a search, the best first: state, epochs, loss, values, and why one has failed.

    With search.seeds, trials that are equal to the best within the spread of seeds are marked by =.
    """
    from tasks.search.analysis import ranked
    from tasks.tracking.search_report import equal_text, equal_trials, search_result, trial_columns

    found = _open(study, url)
    trials, result = ranked(found.trials), search_result(found)
    equal = equal_trials(result)
    if json_output:
        marked = [trial.to_dict() | {"equal": trial.number in equal} for trial in trials]
        print_json({"study": found.name, "trials": marked, "seeds": result["seeds"]})
    elif trials:
        columns = trial_columns(found, trials, equal)
        names = list(columns)
        # what matters least is left out of a narrow table first
        print_table(columns, names[: names.index(found.minimized) : -1], found.name)
        if text := equal_text(result):
            print_line(text)
    else:
        print_line(f"{found.name} has no trial yet")


@app.command("report")
@friendly
def report(study: StudyArgument = "", url: UrlOption = "", json_output: JsonOption = False) -> None:
    """Write the report of a search, an HTML page with its plots and trials, to the data folder, and print where."""
    from tasks.tracking.search_report import write_report

    found = _open(study, url)
    path = write_report(found).path
    if json_output:
        print_json({"study": found.name, "report": str(path)})
    else:
        print_line(f"report: {path}")


@app.command("stop")
@friendly
def stop(study: StudyArgument = "", url: UrlOption = "") -> None:
    """Ask a search to begin nothing more: it ends when the trials that train have ended, and may be continued."""
    found = _open(study, url)
    found.ask_to_stop()
    print_line(f"{found.name} ends after the trials that train now; the same `starling search CONFIG` continues it")
