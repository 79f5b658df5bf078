"""Only failures of the infrastructure are retried."""

import errno
import sqlite3

import botocore.exceptions
import httpx
import pytest
import requests
import sqlalchemy.exc
from mlflow.exceptions import MlflowException, RestException
from prefect.exceptions import ObjectNotFound
from prefect.states import Failed

from storage.locks import LockTimeoutError
from storage.retries import ObjectMissingError, ObjectStoreError, RetryPolicy, with_retries
from tasks.config.pipeline import ConfigError
from tasks.failures import passes, retry_when_passing
from tasks.locking.slots import SlotTakenError
from tasks.stages.base import StageError
from training.launch.training_process import TrainingFailedError


def http_error(status, package=httpx):
    """The exception for a server's answer with this status."""
    if package is httpx:
        request = httpx.Request("GET", "http://x")
        return httpx.HTTPStatusError("answered", request=request, response=httpx.Response(status, request=request))
    reply = requests.Response()
    reply.status_code = status
    return requests.HTTPError("answered", response=reply)


def s3_error(code, status):
    return botocore.exceptions.ClientError(
        {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject"
    )


def after_retries(error):
    """The exception that `with_retries` raises for a storage error."""

    def fail():
        raise error

    with pytest.raises(ObjectStoreError) as caught:
        with_retries(fail, "s3://b/k", RetryPolicy(attempts=1))
    return caught.value


def with_cause(error, cause):
    error.__cause__ = cause
    return error


PASSING = [
    ConnectionResetError("reset"),
    ConnectionError("urllib says so"),
    TimeoutError(errno.ETIMEDOUT, "timed out"),
    OSError(errno.EHOSTUNREACH, "no route"),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("slow"),
    http_error(503),
    http_error(502, requests),
    requests.ConnectionError("refused"),
    requests.Timeout("slow"),
    s3_error("SlowDown", 503),
    s3_error("InternalError", 500),
    botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"),
    after_retries(ConnectionResetError("reset")),
    after_retries(s3_error("InternalError", 500)),
    MlflowException("API request to http://x failed with exception HTTPConnectionPool: Max retries exceeded"),
    RestException({"error_code": "TEMPORARILY_UNAVAILABLE", "message": "later"}),
    sqlalchemy.exc.OperationalError("select", {}, sqlite3.OperationalError("database is locked")),
    with_cause(RuntimeError("the stage failed"), httpx.ConnectError("refused")),
]
FINAL = [
    ValueError("bad data"),
    ConfigError("no such field"),
    StageError("no validation set"),
    with_cause(StageError("no such pool"), httpx.ConnectError("refused")),
    with_cause(ValueError("bad header"), ConnectionResetError("reset")),
    TrainingFailedError("training ended with status 1"),
    SlotTakenError("another run is at it"),
    LockTimeoutError("held by another"),
    KeyError("x"),
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EACCES, "forbidden"),
    OSError("a message of somebody's"),
    FileNotFoundError(errno.ENOENT, "no file"),
    ObjectMissingError("no object"),
    http_error(401),
    http_error(404, requests),
    s3_error("NoSuchKey", 404),
    s3_error("InvalidAccessKeyId", 403),
    after_retries(PermissionError(errno.EACCES, "forbidden")),
    botocore.exceptions.NoCredentialsError(),
    RestException({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no model"}),
    MlflowException("a name must not be empty"),
    ObjectNotFound(http_error(404)),
    sqlalchemy.exc.IntegrityError("insert", {}, sqlite3.IntegrityError("twice")),
    None,
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_infrastructure_failures_are_transient(error):
    assert passes(error)
    assert retry_when_passing(None, None, Failed(data=error))


@pytest.mark.parametrize("error", FINAL, ids=repr)
def test_all_other_failures_are_final(error):
    assert not passes(error)
    assert not retry_when_passing(None, None, Failed(data=error))


def test_cyclic_exception_chain_is_handled():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not passes(first)
