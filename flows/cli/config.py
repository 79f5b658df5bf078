"""`starling config`: what a configuration says in full, what is wrong with it, and the reference of all fields."""

import sys

import typer

from flows.cli.commands import CommandGroup
from flows.cli.common import JsonOption, SetOption, friendly, out, print_json, print_line
from flows.cli.configs import ConfigArgument

app = CommandGroup("Show and check configurations.")


@app.command("show")
@friendly
def show(config: ConfigArgument, overrides: SetOption = None, json_output: JsonOption = False) -> None:
    """Print all values of a configuration, each with where it came from: a line of the file, --set, or a default."""
    from tasks.config.origins import annotated, origins

    loaded, by_place = origins(config, overrides or [])
    if json_output:
        document = loaded.model_dump(mode="json", by_alias=True)
        places = {".".join(map(str, place)): origin for place, origin in by_place.items()}
        print_json({"config": document, "origins": places, "places": _places(loaded.storage.url)})
        return
    sys.stdout.write(annotated(loaded, by_place))
    for name, value in _places(loaded.storage.url).items():
        sys.stdout.write(f"# {name}: {value}\n")


def _places(configured: str) -> dict[str, str]:
    """Where a run's results go, which the environment decides as well."""
    from tasks.config.home import home, objects_url, shown_mlflow_uri
    from training.processes.logs import redact

    return {"data folder": str(home()), "object store": redact(objects_url(configured)), "MLflow": shown_mlflow_uri()}


@app.command("check")
@friendly
def check(config: ConfigArgument, overrides: SetOption = None, json_output: JsonOption = False) -> None:
    """Check a configuration and the files, corpora and devices that it names; the exit status is 1 if one is wrong."""
    from tasks.config.mistakes import listed
    from tasks.config.pipeline import ConfigError, load_config
    from tasks.stages.base import stages_of
    from tasks.stages.config_check import find_problems

    loaded = load_config(config, overrides or [])
    problems, stages = find_problems(loaded), stages_of(loaded)
    if json_output:
        print_json({"name": loaded.name, "stages": stages, "problems": problems})
    elif problems:
        raise ConfigError(listed(str(config), problems))
    else:
        sources = len(loaded.data.sources)
        what = "its source is" if sources == 1 else f"its {sources} sources are"
        print_line(f"{config}: no mistake found; {what} readable")
        out.print(f"stages: {', '.join(stages)}", highlight=False)
    if problems:
        raise typer.Exit(1)


@app.command("reference")
@friendly
def print_reference() -> None:
    """Print the reference of all fields in Markdown, as in docs/reference.md."""
    from tasks.config.pipeline import PipelineConfig
    from tasks.config.reference import reference

    sys.stdout.write(reference(PipelineConfig))
