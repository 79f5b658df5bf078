"""Checks before a run that the servers it needs are reachable, so that a training of hours does not fail at its end.

An outage during a run only delays it.
"""

import os
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from storage.objects import ObjectStore
from storage.retries import CREDENTIALS, ObjectStoreError, RetryPolicy, has_own_remedy
from tasks.config.credentials import export_credentials
from tasks.config.home import mlflow_uri, objects_url, shown_mlflow_uri
from tasks.config.pipeline import PipelineConfig
from tasks.failures import passes
from tasks.stages.base import position
from training.processes.logs import redact

REQUEST_S = 5.0
"""Time limit of a request, in seconds."""
PATIENCE_S = 8.0
"""Seconds that a command waits for a server that restarts."""
_PAUSE_S = 1.0
_LATER_S = 1.0
"""Seconds after REQUEST_S until a request that ignores its own time limit is left alone."""
_UNAUTHORIZED = (401, 403)
_answered: set[str] = set()


class UnreachableError(RuntimeError):
    """A server that a run needs is unreachable.

    Args:
        trouble: What is wrong, with the server's address.
        remedy: What to do, with the names of variables and fields.
    """

    def __init__(self, trouble: str, remedy: str) -> None:
        super().__init__(f"{trouble}: {remedy}")
        self.trouble, self.remedy = trouble, remedy


def check_servers(
    config: PipelineConfig,
    until: str,
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
    can_stop: bool = True,
) -> None:
    """Check the object store, and MLflow if a stage needs it; each server is checked once in a process.

    Args:
        config: The run's configuration.
        until: Its last stage. Before `register`, MLflow may be unreachable: metrics wait in the journal.
        say: Called with messages about servers that are waited for, or that the run can do without.
        patience_s: How long to wait for an unreachable server.
        can_stop: Whether the run has the option `--until`, which the error suggests.

    Raises:
        UnreachableError: If a server does not answer.
    """
    # a block's credentials are at the Prefect server, which may not run yet
    if not config.storage.credentials or os.environ.get("PREFECT_API_URL"):
        _once(objects_url(config.storage.url), lambda: check_store(config, patience_s, say))
    if position(until) < position("train"):
        return
    try:
        _once(mlflow_uri(), lambda: check_mlflow(patience_s, say))
    except UnreachableError as error:
        if position(until) >= position("register"):
            instead = (
                ", or stop before it is needed: with `starling run --until score` metrics wait in the journal; the "
                "same command without --until then sends them and registers the model"
            )
            raise UnreachableError(error.trouble, error.remedy + (instead if can_stop else "")) from error
        say(f"{error}; until then, metrics wait in the journal")


def _once(address: str, check: Callable[[], None]) -> None:
    if address not in _answered:
        check()
        _answered.add(address)


def check_mlflow(patience_s: float = 0.0, say: Callable[[str], None] = lambda _: None) -> None:
    """Check MLflow, if it is a server.

    Args:
        patience_s: How long to wait for an unreachable server.
        say: Called with a message when it waits.

    Raises:
        UnreachableError: If the server does not answer, or rejects the password.
    """
    if not mlflow_uri().startswith(("http://", "https://")):
        return

    from tasks.tracking.runs import client, impatient  # takes seconds, which must not count as the server's

    def ask() -> None:
        with impatient(int(REQUEST_S), always=True):
            client().search_experiments(max_results=1)

    _ask(
        f"MLflow at {shown_mlflow_uri()}",
        ask,
        "start it, or correct or unset MLFLOW_TRACKING_URI (without it a database in the data folder is used)",
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN) to what it accepts",
        patience_s,
        say,
    )


def check_prefect(patience_s: float = 0.0, say: Callable[[str], None] = lambda _: None) -> None:
    """Check the Prefect server of PREFECT_API_URL, if it is set.

    Args:
        patience_s: How long to wait for an unreachable server.
        say: Called with a message when it waits.

    Raises:
        UnreachableError: If the server does not answer, or rejects the password.
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
        "start it, or correct or unset PREFECT_API_URL (without it the run starts its own server; "
        "--no-prefect needs none)",
        "set PREFECT_API_AUTH_STRING (or PREFECT_API_KEY) to what it accepts",
        patience_s,
        say,
    )


def check_store(
    config: PipelineConfig | None = None,
    patience_s: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Check the object store, if it is a server.

    Args:
        config: Configuration with the store; by default that of a configuration without `storage`.
        patience_s: How long to wait for an unreachable server.
        say: Called with a message when it waits.

    Raises:
        UnreachableError: If the server does not answer, or rejects the key.
    """
    url = objects_url(config.storage.url if config else "")
    if "://" not in url or url.startswith(("file:", "memory:", "local:")):
        return
    if config is not None:
        export_credentials(config.storage)
    protocol = url.partition("://")[0]
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "") if protocol == "s3" else ""
    field = "storage.url" if config is not None and config.storage.url else "STARLING_OBJECTS"
    _ask(
        f"the object store {url}" + (f" at {endpoint}" if endpoint else ""),
        lambda: _probe(url),
        f"start it, or correct {'AWS_ENDPOINT_URL or ' if endpoint else ''}{field} (without {field} a folder is used)",
        f"set {CREDENTIALS.get(protocol, 'its credentials')} to what it accepts",
        patience_s,
        say,
    )


def _probe(url: str) -> None:
    ObjectStore(url, retry=RetryPolicy(attempts=1)).exists("done.json")


def _ask(
    what: str, ask: Callable[[], Any], remedy: str, password: str, patience_s: float, say: Callable[[str], None]
) -> None:
    """Repeat a request until the server answers, or the time is up."""
    deadline, announced = time.monotonic() + patience_s, False
    while (failure := _failure(ask)) is not None:
        if _refused(failure) and not has_own_remedy(failure.__cause__):
            raise UnreachableError(f"{what} refuses the password", password) from failure
        if isinstance(failure, ObjectStoreError) and not passes(failure):
            raise failure  # its message has a remedy
        if not (isinstance(failure, TimeoutError) or passes(failure)):
            raise UnreachableError(f"{what} cannot be used ({_reason(failure)})", remedy) from failure
        if time.monotonic() > deadline:
            raise UnreachableError(f"{what} does not answer ({_reason(failure)})", remedy) from failure
        if not announced:
            say(f"{what} does not answer; waiting for it")
        announced = True
        time.sleep(_PAUSE_S)


def _failure(ask: Callable[[], Any]) -> Exception | None:
    """The exception of a request, or None; a hanging request is left in its thread, since clients wait for minutes."""
    outcomes: list[Exception | None] = []

    def work() -> None:
        try:
            ask()
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=copy_context().run, args=(work,), name="reachable", daemon=True)
    thread.start()
    thread.join(REQUEST_S + _LATER_S)
    return outcomes[0] if outcomes else TimeoutError(f"no answer within {REQUEST_S:.0f} s")


def _refused(error: BaseException | None) -> bool:
    """Whether a server answered that the credentials are wrong or missing."""
    while error is not None:
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(response, dict):  # S3
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if callable(code := getattr(error, "get_http_status_code", None)):
            status = code()
        if status in _UNAUTHORIZED or isinstance(error, PermissionError):
            return True
        error = error.__cause__
    return False


def _reason(error: BaseException) -> str:
    """The innermost cause, shortened."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = redact(str(error)).strip()
    text = text.partition("Caused by ")[2] or text  # without the prefix of requests and MLflow
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:200].rstrip(": ")
