"""`starling up` and `starling deploy`: the servers, the worker, and what runs by itself."""

import io
import json
import os
import signal
import sys
import threading
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flows.cli.common import JsonOption, SetOption, err, friendly, out, print_json
from training.processes import adopt_orphans

if TYPE_CHECKING:
    from flows.services import Service

DEFAULT_CONFIG = Path("configs/demo.yaml")
ConfigOption = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", help="Configuration to deploy; repeatable. Default: configs/demo.yaml."),
]


@friendly
def up(
    config: ConfigOption = None,
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow server.")] = 5000,
    json_output: JsonOption = False,
) -> None:
    """Start Prefect, MLflow and a worker on this machine, deploy, and wait for Ctrl-C."""
    from flows import services

    if running := services.running_services():
        raise services.ServiceError(f"servers of this data folder run already: {running}")
    stop = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())
    for port in (prefect_port, mlflow_port):
        _check_port(port)
    adopt_orphans()
    with ExitStack() as stack:
        started = [services.start_prefect(prefect_port), services.start_mlflow(mlflow_port)]
        for service in started:
            stack.callback(service.stop)
        # a worker that has to be killed leaves its flows; they end while the server can still note it
        stack.callback(services.end_orphans, {service.process.pid for service in started})
        for service in started:
            err.print(f"[dim]waiting for {service.name}[/dim]")
            service.wait(stop=stop)
        if stop.is_set():
            return
        urls = {service.name: service.url for service in started}
        os.environ.update(services.prefect_environment())
        os.environ.update({"PREFECT_API_URL": f"{urls['prefect']}/api", "MLFLOW_TRACKING_URI": urls["mlflow"]})
        deployed = _deploy_all(config)
        workers = _start_workers([str(entry["deployment"]) for entry in deployed], config)
        for worker in workers:
            stack.callback(worker.stop)
        services.note_path().write_text(json.dumps(urls), encoding="utf-8")
        stack.callback(services.note_path().unlink, missing_ok=True)
        _announce(urls, deployed, json_output)
        while not stop.wait(1.0):
            for service in (*started, *workers):
                if service.process.poll() is not None:
                    raise services.ServiceError(f"{service.name} ended by itself; its log is {service.log}")
        err.print("stopping")


def _start_workers(deployments: list[str], configs: list[Path] | None) -> "list[Service]":
    """A worker that runs one pipeline at a time, and, where nodes are Prefect runs, one for them for each pool."""
    from flows.deployments import DEFAULT_QUEUE, POOL
    from tasks.nodes import QUEUE

    workers = [_worker("worker", POOL, DEFAULT_QUEUE, "--limit", "1")]
    if any(name.startswith("node/") for name in deployments):
        from tasks.config import load_config

        launches = [load_config(path).train.launch for path in configs or [DEFAULT_CONFIG]]
        pools = sorted({launch.pool for launch in launches if launch.kind == "prefect"})
        workers += [_worker(f"worker-{pool}-nodes", pool, QUEUE) for pool in pools]
    return workers


def _worker(name: str, pool: str, queue: str, *more: str) -> "Service":
    from flows import services

    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--work-queue", queue]
    return services.spawn(name, [*command, "--type", "process", "--name", f"starling-local-{queue}", *more], "", "")


def _check_port(port: int) -> None:
    """Make sure that nothing listens on a port.

    Raises:
        ValueError: If something does.
    """
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} is taken: end what listens there, or give another with --prefect-port or --mlflow-port"
            ) from error


def _deploy_all(configs: list[Path] | None, overrides: list[str] | None = None) -> list[dict[str, object]]:
    from flows.deployments import deploy as register
    from tasks.config import load_config

    given = configs or ([DEFAULT_CONFIG] if DEFAULT_CONFIG.is_file() else [])
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # Prefect prints tables
        return [entry for path in given for entry in register(load_config(path, overrides or []))]


def _announce(urls: dict[str, str], deployed: list[dict[str, object]], json_output: bool) -> None:
    if json_output:
        print_json({"urls": urls, "deployments": deployed})
        return
    out.print(f"Prefect  {urls['prefect']}", highlight=False)
    out.print(f"MLflow   {urls['mlflow']}", highlight=False)
    _table(deployed)
    out.print("Ctrl-C stops everything.")


def _table(deployed: list[dict[str, object]]) -> None:
    table = Table("deployment", "schedule (UTC)", header_style="bold")
    for entry in deployed:
        table.add_row(str(entry["deployment"]), str(entry["schedule"] or "on demand"))
    out.print(table)


@friendly
def deploy(
    config: ConfigOption = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Register the deployments of configurations, with their schedules, at the running Prefect server."""
    from flows import services

    services.set_prefect_defaults()
    if not os.environ.get("PREFECT_API_URL"):
        url = services.running_services().get("prefect")
        if url is None:
            raise services.ServiceError("no Prefect server runs: start `starling up`, or set PREFECT_API_URL")
        os.environ["PREFECT_API_URL"] = f"{url}/api"
    if not config and not DEFAULT_CONFIG.is_file():
        raise ValueError("there is no configs/demo.yaml here: name a configuration with --config")
    deployed = _deploy_all(config, overrides)
    if json_output:
        print_json({"deployments": deployed})
    else:
        _table(deployed)
