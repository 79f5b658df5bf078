"""Tells transient failures, such as a restarting server or a dropped connection, from final ones."""

from typing import Any

from storage.locks import LockTimeoutError
from storage.retries import ObjectStoreError, is_transient

RETRIES = 3
"""How often a task is retried after a transient failure."""
DELAYS_S = (10, 30, 90)
"""Seconds before each retry."""
JITTER = 0.5
"""Relative jitter of the delays, so that runs that lost the same server do not all retry at once."""
_PASSING_STATUS = (408, 429, 500, 502, 503, 504)
_FINAL = ("StageError", "SlotTakenError")
"""Class names, since their modules import this one."""
_HTTP_PACKAGES = ("httpx", "requests", "urllib3", "aiohttp")
_DATABASE_ERRORS = ("OperationalError", "InterfaceError", "DisconnectionError")
_MLFLOW_LOST = ("Max retries exceeded", "Connection refused", "timeout exception", "Connection aborted", "timed out")


def passes(error: BaseException | None) -> bool:
    """Whether a failure is transient: caused by the infrastructure, so that a retry may succeed.

    The causes of the exception are checked, too. Errors in data or configuration are never transient.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, ValueError | LockTimeoutError) or type(error).__name__ in _FINAL:
            return False
        if _passes(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _passes(error: BaseException) -> bool:
    package = type(error).__module__.partition(".")[0]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if package == "mlflow":
        return _mlflow_passes(error)
    if isinstance(status, int):
        return status in _PASSING_STATUS
    if package in ("sqlalchemy", "sqlite3", "psycopg2"):
        return type(error).__name__ in _DATABASE_ERRORS
    if package in _HTTP_PACKAGES or package == "prefect":
        return _names(error) & {"TransportError", "ConnectionError", "Timeout", "HTTPError", "ClientError"} != set()
    if isinstance(error, ObjectStoreError):
        return error.__cause__ is not None and is_transient(error.__cause__)
    # an OSError without errno was raised by a library, not by the operating system
    by_system = isinstance(error, OSError) and (error.errno is not None or isinstance(error, ConnectionError))
    return (by_system or package in ("botocore", "aiobotocore")) and is_transient(error)


def _names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _mlflow_passes(error: Any) -> bool:
    """Whether an error of MLflow is transient: only REST errors carry a status; others are recognized by their text."""
    status = getattr(error, "get_http_status_code", lambda: 0)()
    if "RestException" in _names(error):
        return status in _PASSING_STATUS
    return any(word in str(error) for word in _MLFLOW_LOST)


def retry_when_passing(task: Any, run: Any, state: Any) -> bool:
    """Whether to retry a failed task; for Prefect's `retry_condition_fn`."""
    return isinstance(state.data, BaseException) and passes(state.data)
