"""Local Prefect and MLflow servers, on loopback, with their files in the data folder.

`starling up` starts both and writes `services.json` to the data folder, where a run finds them. Without it a run starts
its own Prefect server (see `flows.servers.prefect_api`), and MLflow works on SQLite without a server.
"""

import http.client
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flows.servers.credentials import SecretError, client_environment
from storage.retries import check_disk
from tasks.config.home import home, mlflow_artifacts
from tasks.tracking.embedded_database import make_ready
from training.processes.children import Child, bind_to_parent, children, see_end

LOOPBACK = "127.0.0.1"
START_S = 180.0
STARTS = 3
"""Attempts to start a server that dies before it answers."""
ANSWER_S = 2.0
"""Seconds that a working server needs for an answer at most; one that starts is asked again."""
LOOK_S = 0.1
"""Seconds between two looks at a server that starts."""
_BACKLOG = 1024
_PORTS, _PORT_TRIES = range(20000, 32768), 1000


class ServiceError(RuntimeError):
    """A server does not start or does not answer."""


@dataclass
class Service:
    """A server process."""

    name: str
    url: str
    health: str
    process: Child
    end: signal.Signals = signal.SIGTERM
    """Signal that stops it; on SIGTERM, PostgreSQL would wait until its clients have disconnected."""

    def wait(self, patience_s: float = START_S, stop: threading.Event | None = None) -> "Service":
        """Wait until the server answers.

        Args:
            patience_s: Time limit.
            stop: Ends the waiting when it is set.

        Raises:
            ServiceError: If it ends, or does not answer in time; the message ends with its log.
            DiskError: If it ends and the disk of its log is full.
        """
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if stop is not None and stop.is_set():
                return self
            if self.process.poll() is not None:
                check_disk(self.log.parent)  # a log cannot say that its disk is full
                raise ServiceError(f"{self.name} ended with status {self.process.returncode}: {self.log_end()}")
            if answers(self.health):
                return self
            time.sleep(LOOK_S)
        raise ServiceError(f"{self.name} did not answer at {self.health} in {patience_s:.0f} s: {self.log_end()}")

    def ask_to_end(self) -> None:
        """Send the signal that stops the server, if it is running."""
        if self.process.poll() is None:
            self.process.send_signal(self.end)

    def stop(self, patience_s: float = 10.0) -> None:
        """Stop the server; kill it after the time limit."""
        self.ask_to_end()
        self.see_end(patience_s)

    def see_end(self, patience_s: float) -> None:
        """Wait until the process has ended; kill it after the time limit."""
        see_end(self.process, patience_s)

    @property
    def log(self) -> Path:
        """Path of its log."""
        return self.process.log

    def log_end(self) -> str:
        """The last lines of its log, for a message."""
        end = self.process.tail(12).strip()
        return f"the end of {self.log}:\n{end}" if end else f"its log, {self.log}, is empty: is the machine very busy?"


def answers(url: str, timeout_s: float | None = None) -> bool:
    """Whether a GET of the URL succeeds; for tcp://HOST:PORT, whether a connection succeeds."""
    timeout_s = ANSWER_S if timeout_s is None else timeout_s
    if url.startswith("tcp://"):
        host, _, port = url.removeprefix("tcp://").partition(":")
        with suppress(OSError, ValueError), socket.create_connection((host, int(port)), timeout_s):
            return True
        return False
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:  # noqa: S310 - our own http URLs only
            return bool(200 <= reply.status < 300)
    except (http.client.HTTPException, OSError, ValueError):  # another program may listen there
        return False


def free_port() -> int:
    """A port that is free, for a server that takes seconds to start.

    It is none of those that the system hands out in the meantime, to outgoing connections and to sockets without a
    port of their own (Linux: from 32768 on).
    """
    for _ in range(_PORT_TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, _PORTS[0] + secrets.randbelow(len(_PORTS))))
            return int(probe.getsockname()[1])
    raise ServiceError(f"no port of {_PORTS[0]} to {_PORTS[-1]} on {LOOPBACK} is free")


def listening() -> socket.socket:
    """A socket that listens on a free loopback port, for a server that may be restarted.

    While the server is down, requests wait in the socket's queue. A closed port would refuse them, which a Prefect
    client without an earlier connection takes for a wrong address; each flow and each slot has its own client.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
    # accepted connections inherit it; uvicorn takes an inherited socket for a Unix socket and does not set it
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def spawn(
    name: str,
    command: list[str],
    url: str,
    health: str,
    env: dict[str, str] | None = None,
    account: Mapping[str, Any] | None = None,
    end: signal.Signals = signal.SIGTERM,
    listener: socket.socket | None = None,
) -> Service:
    """Start a server as a child that ends with this process; its output goes to a log in the data folder.

    Args:
        name: Name of the server and its log; the previous log is kept as NAME.log.1.
        command: Command line.
        url: URL of the server.
        health: URL that answers once the server works.
        env: Variables besides those of this process.
        account: Arguments of `Popen` (user, group) for a server that runs as another user.
        end: Signal that stops it.
        listener: Socket that the server inherits.
    """
    log = home() / "logs" / f"{name}.log"
    if log.exists():
        log.replace(log.with_name(f"{name}.log.1"))
    process = Child(
        command,
        log,
        env,
        start_new_session=True,  # Ctrl-C must not reach the servers, which this process needs while it ends
        preexec_fn=partial(bind_to_parent, end),
        pass_fds=[listener.fileno()] if listener else [],
        **(account or {}),
    )
    return Service(name, url, health, process, end)


def end_orphans(keep: set[int], patience_s: float = 15.0) -> None:
    """Terminate the children of this process except those to keep, and kill them after the time limit.

    Descendants that this process adopts as orphans are ended as well.
    """
    deadline = time.monotonic() + patience_s
    sent: dict[int, int] = {}
    while orphans := set(children()) - keep:
        late = time.monotonic() > deadline
        wanted = signal.SIGKILL if late else signal.SIGTERM
        for pid in orphans:
            if sent.get(pid) != wanted:
                os.kill(pid, wanted)  # safe: the pid cannot be reused before the child is waited for
                sent[pid] = wanted
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)


def prefect_environment() -> dict[str, str]:
    """Environment of all Prefect processes on this data folder."""
    return {
        "STARLING_HOME": str(home()),  # absolute, since a worker runs flows in another folder
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # flows.deploy.automations relies on it
        "DO_NOT_TRACK": "1",
    }


def set_prefect_defaults() -> None:
    """Set `prefect_environment` in this process; variables that are already set are kept."""
    for name, value in prefect_environment().items():
        os.environ.setdefault(name, value)


def start_prefect(
    port: int = 0, more: Mapping[str, str] | None = None, listener: socket.socket | None = None
) -> Service:
    """Start a Prefect server (API, UI, scheduler), by default with a SQLite database in the data folder.

    Args:
        port: Port; 0 takes a free one.
        more: Further environment, for another database and passwords.
        listener: A socket to serve on instead of a port, as returned by `listening`.
    """
    port = int(listener.getsockname()[1]) if listener else port or free_port()
    url = f"http://{LOOPBACK}:{port}"
    # not `prefect server start`, which imports everything twice, in a parent and a child
    command = [sys.executable, "-m", "uvicorn", "--factory", "flows.servers.prefect_server:create_app"]
    command += ["--fd", str(listener.fileno())] if listener else ["--host", LOOPBACK, "--port", str(port)]
    command += ["--log-level", "warning", "--lifespan", "on"]
    env = {**prefect_environment(), "PREFECT_API_URL": f"{url}/api", "PREFECT_UI_API_URL": f"{url}/api"}
    env["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "NOTSET"  # commands silence their own console
    env |= more or {}
    return spawn("prefect", command, url, f"{url}/api/health", env, listener=listener)


def start_mlflow(port: int = 0) -> Service:
    """Start an MLflow server on the data folder's SQLite database and artifacts.

    Raises:
        EmbeddedDatabaseError: If the database cannot be used; the message names a remedy.
    """
    port = port or free_port()
    url = f"http://{LOOPBACK}:{port}"
    make_ready(database := home() / "mlflow" / "mlflow.db")
    command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    # clients on this machine write artifacts directly to the folder, with or without the server
    command += ["--backend-store-uri", f"sqlite:///{database}", "--no-serve-artifacts"]
    command += ["--default-artifact-root", mlflow_artifacts().as_uri()]
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return spawn("mlflow", command, url, f"{url}/health", env)


def note_path() -> Path:
    """Path of `services.json`, in which `starling up` lists its servers."""
    return home() / "services.json"


def services_note() -> dict[str, Any]:
    """Content of `services.json`; empty if there is none."""
    try:
        note = json.loads(note_path().read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return note if isinstance(note, dict) else {}


def running_services() -> dict[str, str]:
    """URLs of the servers of a `starling up` on this data folder that answer."""
    note = services_note()
    health = {"prefect": "/api/health", "mlflow": "/health"}
    return {name: note[name] for name, path in health.items() if name in note and answers(note[name] + path)}


def export_credentials() -> None:
    """Export the credentials of the servers of a production `starling up` on this data folder.

    Variables that are already set are kept, and no password is set for a service that is configured elsewhere.
    """
    note = services_note()
    if "secrets" not in note:
        return
    try:
        credentials = client_environment(Path(note["secrets"])) | note["environment"]
    except SecretError:  # whatever needs a password reports that itself
        return
    owners = {
        "PREFECT_": (os.environ.get("PREFECT_API_URL"), f"{note['prefect']}/api"),
        "MLFLOW_": (os.environ.get("MLFLOW_TRACKING_URI"), note["mlflow"]),
        "AWS_": (os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ACCESS_KEY_ID"), note.get("s3")),
        "STARLING_STUDIES": (os.environ.get("STARLING_STUDIES"), note["environment"].get("STARLING_STUDIES")),
    }
    for name, value in credentials.items():
        given, ours = next((known for prefix, known in owners.items() if name.startswith(prefix)), (None, None))
        if given in (None, "", ours):
            os.environ.setdefault(name, value)


def connect_mlflow() -> None:
    """Use the MLflow server of a `starling up`, unless another tracking URI is configured."""
    export_credentials()
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        url = running_services().get("mlflow")
        if url:
            os.environ["MLFLOW_TRACKING_URI"] = url
