"""Which failures are retried, how often, and the messages to the user."""

import errno
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.retries import (
    ForeignAnswerError,
    ObjectMissingError,
    ObjectStoreError,
    RetryPolicy,
    explain,
    is_transient,
    redact,
    with_retries,
)

FAST = RetryPolicy(attempts=4, base_s=0.0)


class FakeClientError(Exception):
    """Looks like botocore's ClientError."""

    def __init__(self, code, status):
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


FakeClientError.__module__ = "botocore.exceptions"


class AzureError(Exception):
    """Looks like azure.core's HttpResponseError."""

    def __init__(self, text, status):
        super().__init__(text)
        self.status_code = status


AzureError.__module__ = "azure.core.exceptions"
HTTPClientError = type("HTTPClientError", (Exception,), {"__module__": "botocore.exceptions"})
NoCredentialsError = type("NoCredentialsError", (Exception,), {"__module__": "botocore.exceptions"})
ServerDisconnectedError = type("ServerDisconnectedError", (Exception,), {"__module__": "aiohttp.client_exceptions"})


def with_cause(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError("reset"), True),
        (TimeoutError("late"), True),
        (OSError(errno.EIO, "I/O"), True),
        (OSError(errno.ESTALE, "stale"), True),
        (OSError("unknown"), True),
        (FileNotFoundError("x"), False),
        (PermissionError("x"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (OSError(errno.EINVAL, "bad"), False),
        (FakeClientError("InternalError", 500), True),
        (FakeClientError("ServiceUnavailable", 503), True),
        (FakeClientError("SlowDown", 400), True),
        (FakeClientError("InvalidBucketName", 400), False),
        (FakeClientError("TooManyRequests", 429), True),
        (with_cause(OSError(errno.EIO, "unknown"), FakeClientError("SomethingNew", 400)), False),
        (with_cause(OSError(errno.EIO, "unknown"), FakeClientError("SomethingNew", 502)), True),
        (AzureError("busy", 503), True),
        (AzureError("forbidden", 403), False),
        (ForeignAnswerError("a web page"), False),
        (with_cause(FileNotFoundError("upload"), FakeClientError("NoSuchUpload", 404)), True),
        (with_cause(FileNotFoundError("key"), FakeClientError("NoSuchKey", 404)), False),
        (HTTPClientError("closed"), True),
        (ServerDisconnectedError("gone"), True),
        (NoCredentialsError("none"), False),
        (ValueError("ours"), False),
    ],
)
def test_transient_failures_are_recognized(error, expected):
    assert is_transient(error) is expected


REMEDIES = {
    "NoSuchBucket": "Create the bucket",
    "ContainerNotFound": "Create the container",
    "InvalidBucketName": "lower-case",
    "InvalidAccessKeyId": "correct AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "Correct AWS_SECRET_ACCESS_KEY",
    "InvalidToken": "AWS_SESSION_TOKEN does not belong",
    "ExpiredToken": "set new values of .*AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "clock of this machine",
    "AccessDenied": "grant it s3:ListBucket",
    "PermanentRedirect": "AWS_DEFAULT_REGION",
    "AuthorizationHeaderMalformed": "AWS_DEFAULT_REGION",
    "SlowDown": "fewer requests",
    "TooManyRequests": "fewer requests",
    "ServiceUnavailable": "restarting or overloaded",
    "QuotaExceeded": "over its quota",
}


@pytest.mark.parametrize("code", REMEDIES)
@pytest.mark.parametrize("translated", [False, True])
def test_each_code_of_s3_has_its_own_remedy(code, translated):
    error = FakeClientError(code, 403)
    failure = explain(with_cause(PermissionError("refused"), error) if translated else error, "s3://b/x")
    assert re.search(REMEDIES[code], str(failure))
    assert code in str(failure)


def failing(errors, result="done"):
    queue = list(errors)

    def action():
        if queue:
            raise queue.pop(0)
        return result

    return action, queue


def test_transient_failure_is_retried_until_success():
    action, left = failing([ConnectionError("1"), TimeoutError("2"), OSError(errno.EIO, "3")])
    assert with_retries(action, "s3://b/x", FAST) == "done"
    assert left == []


def test_retries_end_after_the_last_attempt():
    action, left = failing([ConnectionError(str(number)) for number in range(9)])
    with pytest.raises(
        ObjectStoreError, match=r"^s3://b/x: failed after 4 attempts \(ConnectionError: 3\)\. Check that"
    ):
        with_retries(action, "s3://b/x", FAST)
    assert len(left) == 5


def test_permanent_failure_is_not_retried():
    action, left = failing([PermissionError("no"), PermissionError("no")])
    with pytest.raises(ObjectStoreError, match="Check AWS_ACCESS_KEY_ID"):
        with_retries(action, "s3://b/x", FAST)
    assert len(left) == 1


def test_missing_object_is_a_file_not_found_error():
    action, _ = failing([FileNotFoundError(errno.ENOENT, "none")])
    with pytest.raises(ObjectMissingError) as caught:
        with_retries(action, "file:///x", FAST)
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.errno == errno.ENOENT


def test_internal_errors_are_raised_unchanged():
    action, _ = failing([KeyError("bug")])
    with pytest.raises(KeyError):
        with_retries(action, "s3://b/x", FAST)


def test_missing_credentials_name_the_variables():
    assert "Set AWS_ACCESS_KEY_ID" in str(explain(NoCredentialsError("Unable to locate credentials"), "s3://b/x"))


def test_messages_hide_credentials(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter22")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    text = str(explain(ConnectionError("AKIAEXAMPLE:hunter22 refused"), "s3://b/x"))
    assert "hunter22" not in text
    assert "AKIA" not in text
    assert redact("plain") == "plain"


@given(st.integers(0, 60))
def test_waits_are_bounded(attempt):
    policy = RetryPolicy()
    assert 0.5 * min(policy.cap_s, policy.base_s * 2**attempt) <= policy.wait_s(attempt) <= policy.cap_s


@pytest.mark.parametrize("values", [{"attempts": 0}, {"base_s": -1.0}, {"cap_s": -1.0}])
def test_policy_refuses_nonsense(values):
    with pytest.raises(ValueError):
        RetryPolicy(**values)
