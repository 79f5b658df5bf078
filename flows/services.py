"""The servers around a run: Prefect's for the flows, MLflow's for the UI; local, on loopback, below the data folder.

`starling up` starts both and leaves a note in the data folder; a run finds the note and uses them. Without it a run
starts a Prefect server of its own (see `flows.prefect_api`), and MLflow works on SQLite without any server.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
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

from flows.credentials import SecretError, client_environment
from storage.retries import check_disk
from tasks.embedded_database import make_ready
from tasks.home import home, mlflow_artifacts
from training.processes import bind_to_parent, end_of_log, see_end

LOOPBACK = "127.0.0.1"
START_S = 180.0
STARTS = 3
"""How often a server is started that dies before it answers."""
_BACKLOG = 1024


class ServiceError(RuntimeError):
    """A server does not start or does not answer."""


@dataclass
class Service:
    """A server process of ours."""

    name: str
    url: str
    health: str
    process: "subprocess.Popen[bytes]"
    log: Path
    end: signal.Signals = signal.SIGTERM
    """What asks it to end; PostgreSQL, told to terminate, would wait for its clients to leave."""

    def wait(self, patience_s: float = START_S, stop: threading.Event | None = None) -> "Service":
        """Wait until it answers.

        Args:
            patience_s: How long.
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
            time.sleep(0.25)
        raise ServiceError(f"{self.name} did not answer at {self.health} in {patience_s:.0f} s: {self.log_end()}")

    def ask_to_end(self) -> None:
        """Ask it to end, politely."""
        if self.process.poll() is None:
            self.process.send_signal(self.end)

    def stop(self, patience_s: float = 10.0) -> None:
        """End it: politely, then not."""
        self.ask_to_end()
        self.see_end(patience_s)

    def see_end(self, patience_s: float) -> None:
        """Wait for the end of what was asked to, and kill it after that time."""
        see_end(self.process, patience_s)

    def log_end(self) -> str:
        """The end of its log, for a message."""
        return f"the end of {self.log}:\n{end_of_log(self.log, lines=12)}"


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Whether something answers there with success; at tcp://HOST:PORT it is enough that something listens."""
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
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def listening() -> socket.socket:
    """A socket that listens on a free port of the loopback, for a server that may be started again.

    While its server is away, requests wait in its queue. At a closed port they would be refused, and a client of
    Prefect's that has never connected, as each flow and each slot has its own, takes that for a wrong address.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
    # accepted connections inherit it; uvicorn takes such a socket for one of the machine's own and does not set it
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
    """Start a server as a child that cannot outlive this process; its output goes to a log in the data folder.

    Args:
        name: Of the server and its log; the log of the start before stays beside it as NAME.log.1.
        command: Words.
        url: Where it will serve.
        health: Where it answers once it works.
        env: Variables besides those of this process.
        account: Arguments of `Popen` (user, group) for a server that runs as somebody else.
        end: Signal that asks it to end.
        listener: Socket that the server inherits.
    """
    log = home() / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    if log.exists():
        log.replace(log.with_name(f"{name}.log.1"))
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C is for this process, which needs its servers until it has ended
            preexec_fn=partial(bind_to_parent, end),
            pass_fds=[listener.fileno()] if listener else [],
            **(account or {}),
        )
    return Service(name, url, health, process, log, end)


def end_orphans(keep: set[int], patience_s: float = 15.0) -> None:
    """End the children of this process other than those to keep: politely, then not; theirs end with them."""
    deadline = time.monotonic() + patience_s
    sent: dict[int, int] = {}
    while orphans := children() - keep:
        late = time.monotonic() > deadline
        wanted = signal.SIGKILL if late else signal.SIGTERM
        for pid in orphans:
            if sent.get(pid) != wanted:
                os.kill(pid, wanted)  # ours, and not yet waited for: the number is still its own
                sent[pid] = wanted
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)


def children() -> set[int]:
    """Process numbers of this process's children, ended ones included."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(entry.parent.name))
    return found


def prefect_environment() -> dict[str, str]:
    """Settings of everything of Prefect's that runs below the data folder."""
    return {
        "STARLING_HOME": str(home()),  # absolute: a worker runs flows from another folder
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # flows.automations counts on it
        "DO_NOT_TRACK": "1",
    }


def set_prefect_defaults() -> None:
    """Give this process those settings, except where its environment has others."""
    for name, value in prefect_environment().items():
        os.environ.setdefault(name, value)


def start_prefect(
    port: int = 0, more: Mapping[str, str] | None = None, listener: socket.socket | None = None
) -> Service:
    """Start a Prefect server (API, UI, scheduler), by default with its SQLite database in the data folder.

    Args:
        port: By default a free one.
        more: Environment of another database, and of passwords.
        listener: A socket to serve on instead of a port; it stays open, see `listening`.
    """
    port = int(listener.getsockname()[1]) if listener else port or free_port()
    url = f"http://{LOOPBACK}:{port}"
    # uvicorn directly: `prefect server start` would import everything twice, in a parent and in a child
    command = [sys.executable, "-m", "uvicorn", "--factory", "flows.prefect_server:create_app"]
    command += ["--fd", str(listener.fileno())] if listener else ["--host", LOOPBACK, "--port", str(port)]
    command += ["--log-level", "warning", "--lifespan", "on"]
    env = {**prefect_environment(), "PREFECT_API_URL": f"{url}/api", "PREFECT_UI_API_URL": f"{url}/api"}
    env |= more or {}
    return spawn("prefect", command, url, f"{url}/api/health", env, listener=listener)


def start_mlflow(port: int = 0) -> Service:
    """Start an MLflow server on the data folder's SQLite database and artifacts.

    Raises:
        EmbeddedDatabaseError: The database cannot be used; the message says what to do.
    """
    port = port or free_port()
    url = f"http://{LOOPBACK}:{port}"
    make_ready(database := home() / "mlflow" / "mlflow.db")
    command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    # clients on this machine write artifacts straight into the folder, with or without the server
    command += ["--backend-store-uri", f"sqlite:///{database}", "--no-serve-artifacts"]
    command += ["--default-artifact-root", mlflow_artifacts().as_uri()]
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return spawn("mlflow", command, url, f"{url}/health", env)


def note_path() -> Path:
    """Where `starling up` says which servers run."""
    return home() / "services.json"


def services_note() -> dict[str, Any]:
    """What `starling up` noted about its servers; empty without one."""
    try:
        note = json.loads(note_path().read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return note if isinstance(note, dict) else {}


def running_services() -> dict[str, str]:
    """URLs of the servers of a `starling up` on this data folder, those that answer."""
    note = services_note()
    health = {"prefect": "/api/health", "mlflow": "/health"}
    return {name: note[name] for name, path in health.items() if name in note and answers(note[name] + path)}


def export_credentials() -> None:
    """Give this process what the servers of a production `starling up` on this data folder ask for.

    What the environment has already stays, and no password is taken for a server that is another's.
    """
    note = services_note()
    if "secrets" not in note:
        return
    try:
        credentials = client_environment(Path(note["secrets"])) | note["environment"]
    except SecretError:  # what needs a password says so itself
        return
    owners = {
        "PREFECT": (os.environ.get("PREFECT_API_URL"), f"{note['prefect']}/api"),
        "MLFLOW": (os.environ.get("MLFLOW_TRACKING_URI"), note["mlflow"]),
        "AWS": (os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ACCESS_KEY_ID"), note.get("s3")),
    }
    for name, value in credentials.items():
        given, ours = owners.get(name.partition("_")[0], (None, None))
        if given in (None, "", ours):
            os.environ.setdefault(name, value)


def connect_mlflow() -> None:
    """Use the MLflow server of a `starling up`, unless another tracking URI is configured."""
    export_credentials()
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        url = running_services().get("mlflow")
        if url:
            os.environ["MLFLOW_TRACKING_URI"] = url
