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
    from tasks.search.study import Study, StudyTrial

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
        check_servers(loaded, "train", _say, can_stop=False)
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

        from flows.deploy.deployments import TAG
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
    """Show how far a search is: trials by state, epochs, the best so far."""
    from flows.search import search_result

    result = search_result(_open(study, url))
    if json_output:
        print_json(result)
    else:
        _print_result(result)


def _print_result(result: dict[str, Any]) -> None:
    counts = ", ".join(f"{count:,} {state}" for state, count in result["trials"].items() if count)
    begun = sum(result["trials"].values())
    limit = f" of {result['total_epochs']:,}" if result["total_epochs"] else ""
    print_line(f"{result['study']}: {result['method']}, {begun:,} of {result['planned']:,} trials ({counts or 'none'})")
    trained = f"epochs trained: {result['epochs']:,}{limit}, in" if result["largest"] else "searched for"
    print_line(f"{trained} {result['seconds'] / 60:.1f} min")
    if best := result["best"]:
        loss = best["losses"][best["trained"]] if best["trained"] in best["losses"] else min(best["losses"].values())
        after = f" after {best['trained']} epochs" if result["largest"] else ""
        print_line(f"best: trial {best['number']}, {result['minimize']} {loss:.4f}{after}")
        for name, value in best["values"].items():
            print_line(f"  {name}={_shown(value)}")


def _shown(value: Any) -> str:
    """A value as `--set` takes it."""
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, width=100_000)
    return text.removesuffix("\n").removesuffix("\n...")


@app.command("best")
@friendly
def best(study: StudyArgument = "", url: UrlOption = "", json_output: JsonOption = False) -> None:
    """Print the values of the best trial as options of `starling run`."""
    import shlex

    from tasks.search.study import StudyError

    found = _open(study, url)
    trial = found.best
    if trial is None:
        raise StudyError(f"the study {found.name} has no result yet: see `starling search show {found.name}`")
    if json_output:
        print_json({"study": found.name, **trial.to_dict()})
        return
    words = [f"--set {shlex.quote(f'{name}={_shown(value)}')}" for name, value in trial.values.items()]
    out.file.write(" ".join(words) + "\n")


@app.command("show")
@friendly
def show(study: StudyArgument = "", url: UrlOption = "", json_output: JsonOption = False) -> None:
    """List the trials of a search, the best first: state, epochs, loss, values, and why one has failed."""
    found = _open(study, url)
    trials = sorted(found.trials, key=lambda t: (-max(t.losses, default=0), _last(t), t.number))
    if json_output:
        print_json({"study": found.name, "trials": [trial.to_dict() for trial in trials]})
        return
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    columns: dict[str, list[str]] = {
        "trial": [str(trial.number) for trial in trials],
        "state": [trial.state for trial in trials],
        **({"epochs": [str(trial.trained) for trial in trials]} if found.about.get("largest") else {}),
        str(found.about.get("minimize", "loss")): [f"{_last(trial):.4f}" if trial.losses else "" for trial in trials],
        **{name: [_shown(t.values[name]) if name in t.values else "" for t in trials] for name in names},
        "error": [trial.error.splitlines()[0] if trial.error else "" for trial in trials],
    }
    if trials:
        print_table(columns, ("error", *reversed(names)), found.name)
    else:
        print_line(f"{found.name} has no trial yet")


def _last(trial: "StudyTrial") -> float:
    """The loss after the largest budget."""
    return trial.losses[max(trial.losses)] if trial.losses else float("inf")


@app.command("stop")
@friendly
def stop(study: StudyArgument = "", url: UrlOption = "") -> None:
    """Ask a search to begin nothing more: it ends when the trials that train have ended, and may be continued."""
    found = _open(study, url)
    found.ask_to_stop()
    print_line(f"{found.name} ends after the trials that train now; the same `starling search CONFIG` continues it")
