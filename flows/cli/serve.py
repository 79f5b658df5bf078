"""`starling serve`: a server that recognizes files and streams with a registered model or a bundle."""

import os
import re
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, fields
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configurable.extras import install_remedy
from flows.cli.common import JsonOption, friendly, print_json, print_line, say
from flows.cli.configs import complete_path
from flows.cli.transcribe import DetectorOption, build_transcriber, check_detector
from flows.servers.shutdown import end_now

if TYPE_CHECKING:
    from recognition.serving.collecting import Collector
    from recognition.serving.limits import ServeLimits
    from recognition.serving.metrics import ServeMetrics
    from recognition.serving.models import ModelSwitch
    from recognition.serving.service import SpeechService
    from tasks.tracking.following import AliasFollower

TOKEN_VARIABLE = "STARLING_SERVE_TOKEN"  # noqa: S105 - the name of the variable
_BATCH_SECONDS = 30.0
"""Audio of a batch: a stream waits for the batch in progress."""
_LOOK_S = 5.0
"""Seconds between two attempts to load a model that is waited for."""
_ALIAS = re.compile(r"models:/([^@/]+)@(.+)")

LogOption = Annotated[
    Path | None,
    typer.Option(
        "--log",
        help="Log of requests. Default: logs/serve-PORT.jsonl in the data folder.",
        show_default=False,
        autocompletion=complete_path,
    ),
]
CollectOption = Annotated[
    Path | None,
    typer.Option(
        "--collect",
        metavar="FOLDER",
        help="Store doubtful utterances with their audio, for people to transcribe: docs/watching.md.",
        show_default=False,
        autocompletion=complete_path,
    ),
]


@friendly
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="NAME (its champion), NAME@ALIAS, NAME/VERSION, models:/… or a bundle's folder. Aliases are followed.",
            show_default=False,
            autocompletion=complete_path,
        ),
    ],
    host: Annotated[
        str, typer.Option("--host", help=f"Address to listen on; one beyond this machine needs ${TOKEN_VARIABLE}.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, cuda:1, or auto (a GPU if there is one).")
    ] = "cpu",
    vad: DetectorOption = "",
    follow_s: Annotated[
        float, typer.Option("--follow-s", min=1.0, help="Seconds between two looks at the alias in the registry.")
    ] = 15.0,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the model is in the registry, and can be loaded.")
    ] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="NAME=NUMBER", help="A limit, e.g. file_mb=25: docs/serving.md. Repeatable."),
    ] = None,
    log: LogOption = None,
    log_text: Annotated[bool, typer.Option("--log-text", help="Write recognized text to the log, too.")] = False,
    collect: CollectOption = None,
    collect_below: Annotated[
        float, typer.Option("--collect-below", help="Utterances with a lower confidence are doubtful; 1: all.")
    ] = 0.8,
    collect_mb: Annotated[
        float, typer.Option("--collect-mb", help="Most that FOLDER may have, in megabytes.")
    ] = 1000.0,
    json_output: JsonOption = False,
) -> None:
    """Serve a model: files as OpenAI's API defines it, streams over a WebSocket, and a page. Ctrl-C ends it."""
    check_packages()
    from recognition.serving.log import RequestLog
    from recognition.serving.service import SpeechService

    limits, token = limits_of(limit or []), os.environ.get(TOKEN_VARIABLE) or None
    check_access(host, token)
    check_detector(vad)
    waited = opened_later(model, device, vad) if wait else None
    with closing(_listener(host, port)) as listener:
        address = f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        served, metrics = waited or open_model(model, device, vad)
        collector = _collector(collect, served.switch.name, metrics, collect_below, collect_mb)
        request_log = RequestLog(log or _usual_log(listener), log_text)
        service = SpeechService(served.switch, limits, token, request_log, metrics, collector)
        _announce(f"http://{address}", service, json_output)
        _run(service, served, listener, follow_s)
    end_now()


def limits_of(assignments: list[str]) -> "ServeLimits":
    """The limits, some of them given as NAME=NUMBER.

    Raises:
        ValueError: There is no such limit, or its value is not a positive number.
    """
    from recognition.serving.limits import ServeLimits

    kinds = {limit.name: int if isinstance(limit.default, int) else float for limit in fields(ServeLimits)}
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in kinds:
            raise ValueError(f"--limit {assignment}: there is no limit {name!r}; there are {', '.join(kinds)}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise ValueError(
                f"--limit {assignment}: give a number, as in {name}={getattr(ServeLimits, name)}"
            ) from None
    return ServeLimits(**values)


def check_access(host: str, token: str | None) -> None:
    """Check that an address beyond this machine is protected by a token.

    Args:
        host: Address to listen on.
        token: What clients have to show.

    Raises:
        ValueError: It is not, or the token is too short, or the address has no meaning.
    """
    from recognition.serving.service import check_token

    check_token(token)
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host or None, None, flags=socket.AI_PASSIVE)}
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host}: there is no such address ({error}): give one of this machine") from error
    local = all(ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)
    if not local and token is None:
        raise ValueError(
            f"--host {host} is reached by other machines, and there is no token: set {TOKEN_VARIABLE} to a secret of "
            "16 characters or more that clients send as `Authorization: Bearer`, or listen on 127.0.0.1"
        )


def check_packages() -> None:
    """Check that the extra is installed.

    Raises:
        ValueError: It is not.
    """
    needed = ("fastapi", "uvicorn", "websockets", "prometheus_client", "python_multipart")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ValueError(f"`starling serve` needs {', '.join(missing)}: {install_remedy('serve')}")


def _listener(host: str, port: int) -> socket.socket:
    from recognition.serving.connections import listen

    return listen(host, port)


def _usual_log(listener: socket.socket) -> Path:
    from tasks.config.home import home

    return home() / "logs" / f"serve-{listener.getsockname()[1]}.jsonl"


@dataclass(frozen=True)
class Served:
    """The model of a server, and what follows its alias if it was named by one."""

    switch: "ModelSwitch"
    follower: "AliasFollower | None" = None


def open_model(model: str, device: str, vad: str) -> "tuple[Served, ServeMetrics]":
    """Load the model to serve.

    Args:
        model: As for the command; likewise the others.
        device: Where it computes.
        vad: Kind of the detector; empty for the usual one.

    Raises:
        ValueError: It is not there, or cannot be used.
    """
    from flows.models import fetch_model, model_uri
    from flows.servers.services import connect_mlflow
    from recognition.serving.metrics import ServeMetrics
    from recognition.serving.models import LoadedModel, ModelSwitch
    from tasks.tracking.following import AliasFollower, load_version
    from tasks.tracking.registry import version_of
    from tasks.tracking.runs import client

    metrics = ServeMetrics()

    def load(version: str, folder: Path, discard: Callable[[], object]) -> LoadedModel:
        transcriber = build_transcriber(folder, device, vad, batch_seconds=_BATCH_SECONDS)
        transcriber.warm_up()
        return LoadedModel(version, transcriber, discard, metrics.batch)

    uri = model_uri(model)
    match = _ALIAS.fullmatch(uri)
    if match is None:
        name, _, version = uri.removeprefix("models:/").partition("/") if uri.startswith("models:/") else ("", "", "")
        loaded = load(version, fetch_model(uri, "MODEL"), lambda: None)
        return Served(ModelSwitch(name or Path(uri).resolve().name, loaded)), metrics
    name, alias = match.groups()
    connect_mlflow()
    about = version_of(client(), name, alias)
    if about is None:
        fetch_model(uri, "MODEL")  # says what there is instead
        raise ValueError(f"{uri} is not in the registry")
    switch = ModelSwitch(name, load_version(name, str(about.version), load))
    return Served(switch, AliasFollower(name, alias, load, switch)), metrics


def opened_later(
    model: str, device: str, vad: str, stop: threading.Event | None = None
) -> "tuple[Served, ServeMetrics] | None":
    """Load the model to serve as soon as it is there; says once why it is not.

    Args:
        model: As for `open_model`; likewise the next two.
        device: Where it computes.
        vad: Kind of the detector.
        stop: Ends the waiting; then there is none.
    """
    from mlflow.exceptions import MlflowException

    from flows.models import model_uri

    model_uri(model)  # what can never be a model is refused at once
    stop, told = stop or threading.Event(), ""
    while not stop.is_set():
        try:
            return open_model(model, device, vad)
        except (ValueError, OSError, MlflowException) as error:
            reason = str(error).partition("\n")[0]
        if reason != told:
            say(f"waiting for {model}: {reason}")
        told = reason
        stop.wait(_LOOK_S)
    return None


def _collector(
    folder: Path | None, model: str, metrics: "ServeMetrics", below: float, most_mb: float
) -> "Collector | None":
    """What stores doubtful utterances, if that is wanted.

    Raises:
        ValueError: A number has no meaning, or the folder cannot be made.
    """
    from recognition.serving.collecting import Collector

    if folder is None:
        return None
    try:
        return Collector(folder.resolve(), model, metrics, below, most_mb)
    except OSError as error:
        raise ValueError(f"--collect {folder}: {error}: give a folder that can be made or written") from error


def _announce(url: str, service: "SpeechService", json_output: bool) -> None:
    switch = service.switch
    if json_output:
        about = {"url": url, "model": switch.name, "version": switch.current.version, "log": str(service.log.path)}
        print_json(about | ({"collects": str(service.collector.folder)} if service.collector is not None else {}))
        return
    version = f", version {switch.current.version}" if switch.current.version else ""
    print_line(f"{url} serves {switch.name}{version}; its log is {service.log.path}")
    if (collector := service.collector) is not None:
        print_line(
            f"utterances with a confidence below {collector.below:g} are stored, audio included, in {collector.folder}"
        )
    say("Ctrl-C ends it.")


def _run(service: "SpeechService", served: Served, listener: socket.socket, follow_s: float) -> None:
    """Serve until a signal, and follow the alias meanwhile."""
    from recognition.serving.app import create_app
    from recognition.serving.connections import DrainingServer

    stop = threading.Event()
    if served.follower is not None:
        # a daemon: a registry that does not answer must not keep the server from ending
        threading.Thread(target=served.follower.run, args=(follow_s, stop), name="follow", daemon=True).start()
    try:
        DrainingServer(create_app(service), service).run_on(listener)
    finally:
        stop.set()
        if service.collector is not None:
            service.collector.close()
        service.log.close()
        served.switch.current.discard()
