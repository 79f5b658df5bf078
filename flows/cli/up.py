"""`starling up` runs this machine's servers and workers; `starling secrets` makes their passwords."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configurable.files import replace_file
from flows.cli.common import JsonOption, err, friendly, out, print_json, print_line, say
from flows.cli.configs import complete_path
from flows.cli.deploy import (
    DEFAULT_CONFIG,
    ConfigOption,
    NotifyOption,
    checked_url,
    deploy_all,
    deployments_table,
)
from flows.servers.shutdown import end_now
from training.processes.children import adopt_orphans

if TYPE_CHECKING:
    from flows.servers.production import Ports
    from flows.servers.services import Service
    from flows.servers.supervisor import Supervisor


_SERVE = "serve"
"""Name of the recognition server and its log."""
_LOOK_S = 1.0
"""Seconds between two looks at the servers and workers."""
# upper limits that add up to less than ten seconds; on an idle machine each step needs only a part of its own
_FLOWS_S = 6.0
"""For flow runs of the workers to write a last checkpoint and report their end."""
_WORKERS_S = 0.7
"""For the workers, which are idle by then."""
_SERVERS_S = 1.5
"""For the servers, whose state is in databases."""


class Profile(StrEnum):
    """Which servers `starling up` starts."""

    small = "small"
    production = "production"


@friendly
def up(
    config: ConfigOption = None,
    profile: Annotated[
        Profile,
        typer.Option(help="small: SQLite, no passwords. production: PostgreSQL, S3, passwords."),
    ] = Profile.small,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Data folder. Default: $STARLING_HOME, or ~/.starling.",
            show_default=False,
            autocompletion=complete_path,
        ),
    ] = None,
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow server.")] = 5000,
    postgres_port: Annotated[int, typer.Option(help="Port of PostgreSQL (production); 0 takes a free one.")] = 5433,
    s3_port: Annotated[int, typer.Option(help="Port of the S3 server (production); 0 takes a free one.")] = 8333,
    serve: Annotated[
        str,
        typer.Option(
            "--serve", metavar="MODEL", help="Also recognize with this model, as soon as it is there: starling serve."
        ),
    ] = "",
    serve_port: Annotated[int, typer.Option(help="Port of recognition (--serve); 0 takes a free one.")] = 8000,
    collect: Annotated[
        Path | None,
        typer.Option(
            "--collect",
            metavar="FOLDER",
            help="Store doubtful utterances, as starling serve --collect does.",
            show_default=False,
            autocompletion=complete_path,
        ),
    ] = None,
    notify_url: NotifyOption = "",
    json_output: JsonOption = False,
) -> None:
    """Start the servers and workers of this machine, deploy, and wait for Ctrl-C."""
    notify_url = checked_url(notify_url)
    recognition = _recognition(serve, serve_port, collect)
    if folder is not None:
        os.environ["STARLING_HOME"] = str(folder.resolve())
    from flows.servers import production, services

    if running := services.running_services():
        raise services.ServiceError(f"servers of this data folder are already running: {running}")
    stop = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())
    ports = production.Ports(prefect_port, mlflow_port, postgres_port, s3_port).chosen()
    _check_ports(profile, ports)
    if recognition is not None:
        _check_port("serve", recognition.port)
    _serve(config, profile, ports, stop, json_output, notify_url, recognition)
    end_now()


def _serve(
    config: list[Path] | None,
    profile: Profile,
    ports: "Ports",
    stop: threading.Event,
    json_output: bool,
    notify_url: str,
    recognition: "RecognitionServer | None" = None,
) -> None:
    """Run servers and workers until `stop` is set; then stop flow runs, workers and servers, in this order."""
    from flows.servers import production, services
    from flows.servers.prefect_api import send_the_rest
    from flows.servers.supervisor import Supervisor

    adopt_orphans()
    supervisor = Supervisor(production.RESTARTS, say=say)
    with ExitStack() as stack:
        stores = production.STORES if profile is Profile.production else 0
        stack.callback(supervisor.stop, 0, 20.0)  # the database last: the others need it, and its shutdown takes time
        stack.callback(supervisor.stop, stores, _SERVERS_S)
        note = _start_servers(profile, ports, supervisor, stop)
        if stop.is_set():
            return
        servers = len(supervisor.services)
        stack.callback(send_the_rest, _WORKERS_S)
        stack.callback(
            lambda: services.end_orphans({service.process.pid for service in supervisor.services}, _WORKERS_S)
        )
        stack.callback(supervisor.stop, servers, _WORKERS_S)
        stack.callback(lambda: _end_work(supervisor.services[servers:]))
        err.print(f"[dim]waiting for {' and '.join(service.name for service in supervisor.services)}[/dim]")
        supervisor.wait(stop=stop)
        if stop.is_set():
            return
        os.environ.update(production.environment_of(note))
        say("registering deployments")
        deployed = deploy_all(config, notify_url=notify_url)
        for start in _workers([str(entry["deployment"]) for entry in deployed], config):
            supervisor.add(start)
        if recognition is not None:
            note["serve"] = supervisor.add(lambda: start_recognition(recognition, note)).url
        replace_file(services.note_path(), json.dumps(note).encode())
        stack.callback(services.note_path().unlink, missing_ok=True)
        _announce(note, deployed, json_output)
        while not stop.wait(_LOOK_S):
            supervisor.check()
            supervisor.reap()
        err.print("stopping")


def _end_work(services: "list[Service]") -> None:
    """End the workers' flow runs, and meanwhile the requests and streams of the recognition server."""
    from flows.servers.local_runs import end_runs

    serving = [service for service in services if service.name == _SERVE]
    deadline = time.monotonic() + _FLOWS_S
    for service in serving:
        service.ask_to_end()
    end_runs([service for service in services if service not in serving], _FLOWS_S)
    for service in serving:
        service.see_end(max(0.0, deadline - time.monotonic()))


@dataclass(frozen=True)
class RecognitionServer:
    """The server that recognizes with a model."""

    model: str
    port: int
    collect: Path | None = None


def _recognition(model: str, port: int, collect: Path | None) -> RecognitionServer | None:
    """The recognition server that the options ask for.

    Raises:
        ValueError: They do not fit, or it cannot run here.
    """
    from flows.cli.serve import check_packages
    from flows.models import model_uri
    from flows.servers.services import free_port

    if not model:
        if collect is not None:
            raise ValueError("--collect needs --serve MODEL: the server of recognition stores the utterances")
        return None
    check_packages()
    model_uri(model)
    return RecognitionServer(model, port or free_port(), collect.resolve() if collect else None)


def start_recognition(server: RecognitionServer, note: dict[str, Any]) -> "Service":
    """Start the recognition server on loopback; in the production profile it asks for a token.

    It is not waited for, since the model may come later.

    Args:
        server: Model and port.
        note: Content of `services.json`.
    """
    from flows.cli.serve import TOKEN_VARIABLE
    from flows.servers.credentials import read_secret
    from flows.servers.services import LOOPBACK, spawn

    command = [sys.executable, "-m", "flows.cli.app", "serve", server.model, "--wait"]
    command += ["--host", LOOPBACK, "--port", str(server.port)]
    command += ["--collect", str(server.collect)] if server.collect else []
    token = {TOKEN_VARIABLE: read_secret(Path(note["secrets"]), "serve_token")} if "secrets" in note else {}
    # SIGINT: it drains for five seconds then, which is what there is time for here
    return spawn(_SERVE, command, f"http://{LOOPBACK}:{server.port}", "", token, end=signal.SIGINT)


def _start_servers(profile: Profile, ports: "Ports", supervisor: "Supervisor", stop: threading.Event) -> dict[str, Any]:
    from flows.servers import production, services

    if profile is Profile.production:
        return production.start_servers(supervisor, ports, stop)
    started = [
        supervisor.add(lambda: services.start_prefect(ports.prefect)),
        supervisor.add(lambda: services.start_mlflow(ports.mlflow)),
    ]
    return {service.name: service.url for service in started}


def _workers(deployments: list[str], configs: list[Path] | None) -> "list[Callable[[], Service]]":
    """A worker that runs one pipeline at a time; for nodes launched by Prefect, another worker for each pool."""
    from flows.deploy.deployments import DEFAULT_QUEUE, POOL
    from tasks.orchestration.nodes import QUEUE

    workers = [_worker("worker", POOL, DEFAULT_QUEUE, "--limit", "1")]
    if any(name.startswith("node/") for name in deployments):
        from tasks.config.pipeline import load_config

        launches = [load_config(path).train.launch for path in configs or [DEFAULT_CONFIG]]
        pools = sorted({launch.pool for launch in launches if launch.kind == "prefect"})
        workers += [_worker(f"worker-{pool}-nodes", pool, QUEUE) for pool in pools]
    return workers


def _worker(name: str, pool: str, queue: str, *more: str) -> "Callable[[], Service]":
    from flows.servers import services

    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--work-queue", queue]
    command += ["--type", "process", "--name", f"starling-local-{queue}", *more]
    return lambda: services.spawn(name, command, "", "")


def _check_ports(profile: Profile, ports: "Ports") -> None:
    """Check that the ports are free.

    Raises:
        ValueError: If one is taken.
    """
    names = ("prefect", "mlflow", "postgres", "s3") if profile is Profile.production else ("prefect", "mlflow")
    for name in names:
        _check_port(name, getattr(ports, name))


def _check_port(name: str, port: int) -> None:
    """Check that the port of a server is free.

    Raises:
        ValueError: If it is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} is taken: stop the program that listens there, or choose another with --{name}-port"
            ) from error


def _announce(note: dict[str, Any], deployed: list[dict[str, Any]], json_output: bool) -> None:
    urls = {name: note[name] for name in ("prefect", "mlflow", "postgres", "s3", _SERVE) if name in note}
    if json_output:
        secrets = {"secrets": note["secrets"]} if "secrets" in note else {}
        print_json({"urls": urls, "deployments": deployed, **secrets})
        return
    titles = {"prefect": "Prefect", "mlflow": "MLflow", "postgres": "PostgreSQL", "s3": "S3", _SERVE: "recognition"}
    for name, url in urls.items():
        out.print(f"{titles[name]:11} {url}", highlight=False)
    if "secrets" in note:
        users = "Prefect: prefect_auth; MLflow: admin, mlflow_admin_password"
        users += "; recognition: serve_token" if _SERVE in note else ""
        text = f"{'passwords':11} {note['secrets']} ({users})"
        print_line(text)
    if deployed:
        deployments_table(deployed)
    else:
        print_line("nothing is scheduled: starling deploy --config my.yaml, or starling up --config my.yaml next time")
    out.print("Ctrl-C stops everything.")


@friendly
def secrets(
    folder: Annotated[
        Path | None, typer.Argument(help="Default: `secrets` in the data folder.", autocompletion=complete_path)
    ] = None,
    for_containers: Annotated[
        bool, typer.Option("--for-containers", help="For docker-compose: files readable in containers, folder closed.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Generate the missing passwords of the production profile, each in its own file."""
    from flows.servers.credentials import make_secrets, secrets_folder

    place = folder or secrets_folder()
    made = make_secrets(place, for_containers)
    if json_output:
        print_json({"folder": str(place), "made": made})
        return
    print_line(f"{place}: made {', '.join(made) or 'nothing, all exist'}")
