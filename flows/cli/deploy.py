"""`starling deploy`: registers deployments with their schedules, work pools, automations and notifications."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flows.cli.common import JsonOption, SetOption, friendly, out, print_json, say
from flows.cli.configs import complete_config, find_configs

if TYPE_CHECKING:
    from flows.deploy.deployments import Options

DEFAULT_CONFIG = Path("configs/demo.yaml")
ConfigOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        "-c",
        help="Configuration to deploy; repeatable. Default: configs/demo.yaml, if it is there.",
        callback=find_configs,
        autocompletion=complete_config,
    ),
]
NotifyOption = Annotated[
    str,
    typer.Option(
        envvar="STARLING_NOTIFY_URL",
        show_envvar=True,
        help="Webhook for failures, crashes and champions; - reads it from standard input. Stored in a block.",
    ),
]


def deploy_all(
    configs: list[Path] | None,
    overrides: list[str] | None = None,
    options: "Options | None" = None,
    notify_url: str = "",
) -> list[dict[str, Any]]:
    """Register the deployments of configurations and their automations at the Prefect server of PREFECT_API_URL.

    Args:
        configs: YAML files; by default configs/demo.yaml, if it exists.
        overrides: `KEY=VALUE` changes to each.
        options: Pool, time zone and watched folders.
        notify_url: Webhook for failures, crashes and champions; empty keeps the current one.

    Returns:
        Name, schedule (cron), time zone and id of each deployment.
    """
    from flows.deploy.automations import apply
    from flows.deploy.deployments import Options
    from flows.deploy.deployments import deploy as register
    from tasks.config.pipeline import load_config

    given = configs or ([DEFAULT_CONFIG] if DEFAULT_CONFIG.is_file() else [])
    loaded = [load_config(path, overrides or []) for path in given]
    deployed = [entry for config in loaded for entry in register(config, options or Options())]
    apply(loaded, deployed, notify_url)
    return deployed


def deployments_table(deployed: list[dict[str, Any]]) -> None:
    """Print the deployments and their schedules."""
    table = Table("deployment", "schedule (cron)", "time zone", header_style="bold")
    for entry in deployed:
        cron = entry["schedule"]
        table.add_row(str(entry["deployment"]), str(cron or "on demand"), str(entry["timezone"]) if cron else "")
    out.print(table)


def connect_prefect() -> None:
    """Use the Prefect server of PREFECT_API_URL, or that of a `starling up`.

    Raises:
        ServiceError: If there is neither.
    """
    from flows.servers import services

    services.set_prefect_defaults()
    if not os.environ.get("PREFECT_API_URL"):
        url = services.running_services().get("prefect")
        if url is None:
            raise services.ServiceError("no Prefect server is running: start `starling up`, or set PREFECT_API_URL")
        os.environ["PREFECT_API_URL"] = f"{url}/api"
    from tasks.orchestration.reachable import PATIENCE_S, check_prefect

    check_prefect(PATIENCE_S, say=say)


def checked_url(url: str) -> str:
    """A webhook's address; - reads it from standard input.

    Raises:
        ValueError: If it is no http(s) URL; the message does not repeat it, since it may contain a secret.
    """
    if url == "-":
        url = sys.stdin.readline().strip()
    if url and not url.startswith(("http://", "https://")):
        raise ValueError("--notify-url: give an address that starts with https:// or http://, or - for standard input")
    return url


@friendly
def deploy(
    config: ConfigOption = None,
    overrides: SetOption = None,
    model: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Model that training begins with: @champion, NAME@ALIAS, NAME/VERSION, or the folder or URL "
            "of a bundle or pretrained model.",
        ),
    ] = "",
    pool: Annotated[str, typer.Option(help="Work pool; created if missing.")] = "starling",
    pool_type: Annotated[str, typer.Option(help="Type of the pool: process, docker or kubernetes.")] = "process",
    image: Annotated[str, typer.Option(help="Image of docker and kubernetes pools; default: starling:0.1.0-cpu.")] = "",
    timezone: Annotated[str, typer.Option(help="Time zone of the schedules.")] = "UTC",
    watch: Annotated[
        list[str] | None,
        typer.Option("--watch", metavar="URL", help="Folder of an object store to watch besides the sources."),
    ] = None,
    notify_url: NotifyOption = "",
    print_only: Annotated[bool, typer.Option("--print", help="Print a prefect.yaml and deploy nothing.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Register the deployments of configurations, with schedules and automations, at the running Prefect server."""
    from flows.deploy.deployments import Options, prefect_yaml
    from flows.deploy.pools import WorkPool
    from tasks.config.model_names import initial_overrides
    from tasks.config.pipeline import load_config

    if not config and not DEFAULT_CONFIG.is_file():
        raise ValueError("there is no configs/demo.yaml here: name a configuration with --config")
    overrides = [*(overrides or []), *initial_overrides(model)]
    options = Options(WorkPool(pool, pool_type, image), timezone, tuple(watch or ()))
    if print_only:
        loaded = [load_config(path, overrides) for path in config or [DEFAULT_CONFIG]]
        sys.stdout.write(prefect_yaml(loaded, options))
        return
    url = checked_url(notify_url)
    connect_prefect()
    deployed = deploy_all(config, overrides, options, url)
    if json_output:
        print_json({"deployments": deployed})
    else:
        deployments_table(deployed)


@friendly
def corpus_changed(
    name: Annotated[str, typer.Argument(help="Name of a deployed configuration.", show_default=False)],
) -> None:
    """Report a changed corpus: the Prefect server then runs the configuration's `ingest` deployment."""
    connect_prefect()
    from flows.watch import announce

    announce(name)
    out.print(f"the Prefect server was notified that the corpus of {name} has changed", highlight=False)
