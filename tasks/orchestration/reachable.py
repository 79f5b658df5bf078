"""Whether the servers answer that a run will need, asked before it begins: a training of hours must not find out last.

An outage in mid-run is another matter, and costs nothing but time.
"""

import os
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from storage.objects import ObjectStore
from storage.retries import ObjectStoreError, RetryPolicy
from tasks.config.credentials import export_credentials
from tasks.config.home import mlflow_uri, objects_url, shown_mlflow_uri
from tasks.config.pipeline import PipelineConfig
from tasks.failures import passes
from tasks.stages.base import position
from training.processes.logs import redact

REQUEST_S = 5.0
"""How long a server may take to answer."""
PATIENCE_S = 8.0
"""How long a command waits for a server that restarts."""
_PAUSE_S = 1.0
_UNAUTHORIZED = (401, 403)
_answered: set[str] = set()


class UnreachableError(RuntimeError):
    """A server that a run needs does not answer.

    Args:
        found: What is wrong, with the server's address.
        remedy: What to do, with the names of variables and fields.
    """

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found}: {remedy}")
        self.found, self.remedy = found, remedy


def check_servers(
    config: PipelineConfig,
    until: str,
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
    can_stop: bool = True,
) -> None:
    """Ask the object store, and MLflow if a stage needs it; asked again in the same process, it costs nothing.

    Args:
        config: The run's configuration.
        until: Its last stage. Before `register`, MLflow may be away: metrics wait in the journal.
        say: Told of trouble that is waited for, or that does not stop the run.
        patience_s: How long to wait for a server that is away.
        can_stop: Whether the run can be told to stop before a stage.

    Raises:
        UnreachableError: If one does not answer.
    """
    # a block's credentials lie at the Prefect server, which may not have been started yet
    if not config.storage.credentials or os.environ.get("PREFECT_API_URL"):
        _once(objects_url(config.storage.url), lambda: check_store(config, patience_s, say))
    if position(until) < position("train"):
        return
    try:
        _once(mlflow_uri(), lambda: check_mlflow(patience_s, say))
    except UnreachableError as error:
        if position(until) >= position("register"):
            instead = (
                ", or stop before it is needed: with `starling run --until score` metrics wait in the journal, and the "
                "same command without it then sends them and registers the model"
            )
            raise UnreachableError(error.found, error.remedy + (instead if can_stop else "")) from error
        say(f"{error}; metrics wait in the journal meanwhile")


def _once(address: str, check: Callable[[], None]) -> None:
    if address not in _answered:
        check()
        _answered.add(address)


def check_mlflow(patience_s: float = 0.0, say: Callable[[str], None] = lambda _: None) -> None:
    """Ask MLflow, where it is a server.

    Args:
        patience_s: How long to wait for it if it is away.
        say: Told that it is waited for.

    Raises:
        UnreachableError: If it does not answer, or refuses the password.
    """
    if not mlflow_uri().startswith(("http://", "https://")):
        return

    from tasks.tracking.runs import client, impatient  # takes seconds, which are not the server's

    def ask() -> None:
        with impatient(int(REQUEST_S), always=True):
            client().search_experiments(max_results=1)

    _ask(
        f"MLflow at {shown_mlflow_uri()}",
        ask,
        "start it, or correct or unset MLFLOW_TRACKING_URI (without it a database in the data folder serves)",
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN) to what it accepts",
        patience_s,
        say,
    )


def check_prefect(patience_s: float = 0.0, say: Callable[[str], None] = lambda _: None) -> None:
    """Ask the Prefect server of PREFECT_API_URL, if one is set.

    Args:
        patience_s: How long to wait for it if it is away.
        say: Told that it is waited for.

    Raises:
        UnreachableError: If it does not answer, or refuses the password.
    """
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        return

    from tasks.locking.leases import impatient_client

    def ask() -> None:
        with impatient_client() as client:
            client.read_flow_runs(limit=1)

    _ask(
        f"the Prefect server at {redact(url)}",
        ask,
        "start it, or correct or unset PREFECT_API_URL (without it the run starts a server of its own; --plain needs "
        "none)",
        "set PREFECT_API_AUTH_STRING (or PREFECT_API_KEY) to what it accepts",
        patience_s,
        say,
    )


def check_store(
    config: PipelineConfig | None = None,
    patience_s: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Ask the object store, where it is a server.

    Args:
        config: Says which; by default the one that a configuration without `storage` has.
        patience_s: How long to wait for it if it is away.
        say: Told that it is waited for.

    Raises:
        UnreachableError: If it does not answer, or refuses the key.
    """
    url = objects_url(config.storage.url if config else "")
    if "://" not in url or url.startswith(("file:", "memory:", "local:")):
        return
    if config is not None:
        export_credentials(config.storage)
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    field = "storage.url" if config is not None and config.storage.url else "STARLING_OBJECTS"
    _ask(
        f"the object store {url}" + (f" at {endpoint}" if endpoint else ""),
        lambda: _probe(url),
        f"start it, or correct {'AWS_ENDPOINT_URL or ' if endpoint else ''}{field} (without {field} a folder serves)",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to what it accepts",
        patience_s,
        say,
    )


def _probe(url: str) -> None:
    ObjectStore(url, retry=RetryPolicy(attempts=1)).exists("done.json")


def _ask(
    what: str, ask: Callable[[], Any], remedy: str, password: str, patience_s: float, say: Callable[[str], None]
) -> None:
    """Ask until there is an answer, or time is up."""
    deadline, told = time.monotonic() + patience_s, False
    while (failure := _failure(ask)) is not None:
        if _refused(failure):
            raise UnreachableError(f"{what} refuses the password", password) from failure
        if isinstance(failure, ObjectStoreError) and not passes(failure):
            raise failure  # which has its own remedy
        if not (isinstance(failure, TimeoutError) or passes(failure)):
            raise UnreachableError(f"{what} cannot be used ({_reason(failure)})", remedy) from failure
        if time.monotonic() > deadline:
            raise UnreachableError(f"{what} does not answer ({_reason(failure)})", remedy) from failure
        if not told:
            say(f"{what} does not answer; waiting for it")
        told = True
        time.sleep(_PAUSE_S)


def _failure(ask: Callable[[], Any]) -> Exception | None:
    """What went wrong with a question; one that hangs is left to its thread, whose client may wait for minutes."""
    found: list[Exception | None] = []

    def work() -> None:
        try:
            ask()
            found.append(None)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=copy_context().run, args=(work,), name="reachable", daemon=True)
    thread.start()
    thread.join(REQUEST_S + 1.0)
    return found[0] if found else TimeoutError(f"no answer within {REQUEST_S:.0f} s")


def _refused(error: BaseException | None) -> bool:
    """Whether a server answered that it does not know the user."""
    while error is not None:
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(response, dict):  # of S3
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if callable(code := getattr(error, "get_http_status_code", None)):
            status = code()
        if status in _UNAUTHORIZED or isinstance(error, PermissionError):
            return True
        error = error.__cause__
    return False


def _reason(error: BaseException) -> str:
    """The innermost cause, in a few words."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = redact(str(error)).strip()
    text = text.partition("Caused by ")[2] or text  # what requests and MLflow put around it
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:200].rstrip(": ")
