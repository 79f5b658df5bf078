"""Bounded retries of storage calls: which errors are transient, how long to wait, and the final error message.

This module alone distinguishes transient errors (a restarting server, a dropped connection, a 503) from permanent ones
(a wrong secret, a full disk). Errors of botocore and aiohttp are recognized by name, so that neither package is needed
without S3.
"""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from storage.disks import disk_state, disk_trouble, explain_disk

T = TypeVar("T")

_LASTING_TYPES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_LASTING_NAMES = (
    "EACCES EPERM ENOENT ENOSPC ENOSYS ENOTDIR ENOTEMPTY EDQUOT EROFS EISDIR ENAMETOOLONG EINVAL EMSGSIZE EFBIG EEXIST "
    "ELOOP"
)
# Codes that do not exist on this system (such as EDQUOT) are left out.
_LASTING_ERRNOS = frozenset(code for code, name in errno.errorcode.items() if name in _LASTING_NAMES.split())
# A restarting server loses unfinished uploads and may receive truncated requests; repeating them helps.
_PASSING_S3_CODES = frozenset(
    {"NoSuchUpload", "InvalidPart", "IncompleteBody", "BadDigest", "RequestTimeout", "SlowDown", "OperationAborted"}
    | {"XAmzContentSHA256Mismatch"}
)
_PASSING_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_REST = "then run again: finished work is kept."
_REGION = (
    "The bucket is in another region or at another endpoint: set AWS_DEFAULT_REGION to the bucket's region, and "
    "AWS_ENDPOINT_URL, if it is set, to the endpoint of that region."
)
_TOKEN = (
    "The temporary credentials have expired: set new values of AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
    f"AWS_SESSION_TOKEN, {_REST}"
)
_CLOCK = f"The clock of this machine is wrong: set it (timedatectl set-ntp true), {_REST}"
_BUSY = f"The server asks for fewer requests: wait, or lower storage.workers and runner.workers, {_REST}"
_STORAGE_FULL = f"The storage behind the server is full or over its quota: free space there, {_REST}"
_RIGHTS = (
    "The server knows the key, but the key may not do this: grant it s3:ListBucket on the bucket, and s3:GetObject, "
    "s3:PutObject and s3:DeleteObject on its objects."
)
_S3_REMEDIES = {
    "ContainerNotFound": "Create the container first, or correct its name in the URL.",
    "NoSuchBucket": "Create the bucket first, or correct its name in the URL.",
    "InvalidBucketName": "Correct the bucket's name in the URL: 3 to 63 lower-case letters, digits, hyphens and dots.",
    "InvalidAccessKeyId": "The server does not know this key: correct AWS_ACCESS_KEY_ID, or AWS_ENDPOINT_URL if the "
    "key belongs to another server.",
    "SignatureDoesNotMatch": "Correct AWS_SECRET_ACCESS_KEY: it is not the secret of AWS_ACCESS_KEY_ID.",
    "InvalidToken": "AWS_SESSION_TOKEN does not belong to AWS_ACCESS_KEY_ID: set the token that was issued with the "
    "key, or unset it if the key needs none.",
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), _TOKEN),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), _CLOCK),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "UnauthorizedAccess"), _RIGHTS),
    "AccountProblem": "The account of this key is blocked or not paid: ask its owner.",
    **dict.fromkeys(
        (
            *("PermanentRedirect", "TemporaryRedirect", "Redirect", "301", "307", "InvalidRegion"),
            *("AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
        ),
        _REGION,
    ),
    **dict.fromkeys(
        (
            *("SlowDown", "TooManyRequests", "TooManyRequestsException", "Throttling", "ThrottlingException", "429"),
            *("RequestLimitExceeded", "RequestThrottled", "BandwidthLimitExceeded"),
        ),
        _BUSY,
    ),
    **dict.fromkeys(("ServiceUnavailable", "503"), f"The server is restarting or overloaded: wait, {_REST}"),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "507"), _STORAGE_FULL),
    "InvalidObjectState": "The object is archived: restore it, and exempt this bucket from archival.",
    "EntityTooLarge": "The server limits the size of an object: raise its limit, or lower storage.shard_seconds.",
}
"""The remedy for each code of S3 whose cause is known."""
_PASSING_BOTOCORE_ERRORS = frozenset(
    {"HTTPClientError", "ConnectionError", "IncompleteReadError", "ResponseParserError"}
)
_PASSING_CLOUD_ERRORS = frozenset({"ServiceRequestError", "ServiceResponseError", "TransportError"})
"""Lost connections, as the libraries of Azure and Google name them."""
_CLIENT_PACKAGES = frozenset({"botocore", "aiobotocore", "aiohttp", "urllib3", "requests", "azure", "gcsfs", "google"})
"""Packages whose exceptions are failures of the storage."""
_OWN_PACKAGES = ("flows", "tasks", "training", "recognition", "speech", "storage", "devices", "typer", "click")
"""Packages whose exceptions already explain themselves, or are not errors (a command's exit)."""
_LONGEST_CAUSE = 500
_SECRET_VARIABLES = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"),
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_SECRET"),
)
_AZURE_KEYS = "AZURE_STORAGE_CONNECTION_STRING (or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY)"
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": _AZURE_KEYS,
    "abfs": _AZURE_KEYS,
}
"""Variables with the credentials, by protocol."""
_ADDRESSES = {
    "s3": "AWS_ENDPOINT_URL",
    "gs": "STORAGE_EMULATOR_HOST, if it is set,",
    "az": _AZURE_KEYS,
    "abfs": _AZURE_KEYS,
}
"""Variables with the server's address, by protocol."""


class ObjectStoreError(OSError):
    """A storage call failed permanently; the message contains the object's URL and the remedy."""


class DiskError(ObjectStoreError):
    """A local disk is full, read-only or not writable for this user; the message names it and the remedy."""


class ForeignAnswerError(OSError):
    """A server answered as no object store does, such as with the page of a login or of another service."""


class ObjectMissingError(ObjectStoreError, FileNotFoundError):
    """The object does not exist."""


@dataclass(frozen=True)
class RetryPolicy:
    """Number of attempts and waiting times.

    The n-th wait is `base_s * 2**n` seconds, at most `cap_s`, times a random factor in 0.5..1, so that many learners
    that lost the same server do not retry at the same time. The defaults wait about 20 s in total.
    """

    attempts: int = 8
    base_s: float = 0.2
    cap_s: float = 8.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}: a call needs at least 1 attempt")
        if self.base_s < 0 or self.cap_s < 0:
            raise ValueError(f"base_s={self.base_s} and cap_s={self.cap_s} are seconds: neither may be negative")

    def wait_s(self, attempt: int) -> float:
        """Seconds to wait after the attempt with this number (0 is the first)."""
        return min(self.cap_s, self.base_s * 2.0**attempt) * random.uniform(0.5, 1.0)


def store_code(error: BaseException | None) -> str:
    """The S3 error code of an exception or its cause ("NoSuchBucket", "503", ...), or Azure's, or ""."""
    if error is not None and _package(error) == "azure":
        return str(getattr(error, "error_code", None) or "")
    for candidate in (error, getattr(error, "__cause__", None)):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            return str(response["Error"].get("Code", ""))
    return ""


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if store_code(error) in _PASSING_S3_CODES:
        return True
    if isinstance(error, (*_LASTING_TYPES, ForeignAnswerError)):
        return False
    if status := _http_status(error):
        return status in _PASSING_STATUSES
    if isinstance(error, OSError):  # includes ConnectionError and TimeoutError
        return error.errno not in _LASTING_ERRNOS
    names = {cls.__name__ for cls in type(error).__mro__}
    passing = _PASSING_BOTOCORE_ERRORS | _PASSING_CLOUD_ERRORS
    return _package(error) in {"aiohttp", "urllib3", "requests"} or bool(names & passing)


def _http_status(error: BaseException) -> int:
    """HTTP status of the answer that an exception or its cause reports; 0 if none."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):  # botocore
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if _package(error) in {"azure", "gcsfs"}:
        status = getattr(error, "status_code", None) or getattr(error, "code", None)
        return status if isinstance(status, int) else 0
    return 0


def _package(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def is_storage_failure(error: BaseException) -> bool:
    """Whether an exception comes from the storage, as opposed to a bug in our code."""
    return isinstance(error, OSError) or _package(error) in _CLIENT_PACKAGES


def with_retries(action: Callable[[], T], url: str, policy: RetryPolicy) -> T:
    """Call `action`, and repeat it after transient errors, at most `policy.attempts` times in total.

    Raises:
        ObjectMissingError: the object (or its bucket) does not exist.
        ObjectStoreError: any other storage failure: a permanent one, or after the last attempt.
    """
    for attempt in range(policy.attempts):
        try:
            return action()
        except ObjectStoreError:
            raise
        except Exception as error:
            if not is_storage_failure(error):
                raise
            if not is_transient(error) or attempt + 1 == policy.attempts:
                raise explain(error, url, attempt + 1) from error
        time.sleep(policy.wait_s(attempt))
    raise AssertionError("unreachable: the loop returns or raises")


@contextmanager
def disk_named(*folders: Path, subject: str = "") -> Iterator[None]:
    """Convert errors of a full, read-only or forbidden local disk to a `DiskError`.

    Args:
        *folders: Folders to which the block writes, the most likely first.
        subject: What the block writes; by default the file named in the system's error.
    """
    try:
        yield
    except (ObjectStoreError, ValueError):
        raise
    except Exception as error:
        number = 0 if _package(error) in _OWN_PACKAGES else disk_trouble(error, folders)
        if not number:
            raise
        raise disk_error(number, error, *folders, subject=subject) from error


def disk_error(number: int, error: BaseException, *folders: Path, subject: str = "") -> DiskError:
    """Create the error that names the failing disk.

    Args:
        number: The errno from `disk_trouble`.
        error: The exception in which it was found.
        *folders: Folders on the disks in question.
        subject: What could not be written, if known.
    """
    failure = DiskError(redact(explain_disk(number, error, folders, subject)))
    failure.errno = number
    return failure


def check_disk(folder: Path) -> None:
    """Check that a folder is writable and its disk not full, before starting work that would fail less clearly.

    Raises:
        DiskError: The disk is full (less than 1 MiB free), read-only or not writable for this user.
    """
    if number := disk_state(folder):
        raise disk_error(number, OSError(number, os.strerror(number)), folder)


def explain(error: BaseException, url: str, attempts: int = 1) -> ObjectStoreError:
    """Convert a storage exception to one with the URL and the remedy, without credentials."""
    if url.startswith("file://") and (number := disk_trouble(error)):
        return disk_error(number, error, Path(url.removeprefix("file://")).parent, subject=url)
    code = store_code(error)
    named = f"{code}: " if code.isalpha() and code not in str(error) else ""
    cause = redact(f"{type(error).__name__}: {named}{' '.join(str(error).split())[:_LONGEST_CAUSE]}")
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    kind = ObjectMissingError if isinstance(error, FileNotFoundError) else ObjectStoreError
    failure = kind(f"{url}: failed{tries} ({cause}). {_remedy(error, url)}")
    failure.errno = getattr(error, "errno", None)
    return failure


def has_own_remedy(error: BaseException | None) -> bool:
    """Whether the store's error code tells the cause, so that the message has a remedy for just that."""
    return store_code(error) in _S3_REMEDIES


def _remedy(error: BaseException, url: str) -> str:
    names = {cls.__name__ for cls in type(error).__mro__}
    protocol = url.partition("://")[0]
    if has_own_remedy(error):
        return _S3_REMEDIES[store_code(error)]
    if isinstance(error, ForeignAnswerError):
        address = _ADDRESSES.get(protocol, "the URL")
        return f"Let {address} name an object store: this is another service, a proxy, or a login page."
    if names & {"NoCredentialsError", "PartialCredentialsError"}:
        return "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment."
    if protocol in CREDENTIALS and (isinstance(error, PermissionError) or _http_status(error) in (401, 403)):
        return f"Check {CREDENTIALS[protocol]}, and the rights of that key."
    if isinstance(error, PermissionError):
        return "Check the owner and the mode of the folder."
    if isinstance(error, FileNotFoundError):
        bucket = " and the bucket's name" if protocol in CREDENTIALS else ""
        return f"Check the name{bucket}, or run the stage that writes it."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "Free some space there and run again: finished shards are kept."
    if protocol in _ADDRESSES and is_transient(error):
        return f"Check that the server runs and that {_ADDRESSES[protocol]} names it, {_REST}"
    return f"Check the URL and the storage, {_REST}"


def redact(text: str) -> str:
    """Replace the values of the credential variables by asterisks."""
    for variable in _SECRET_VARIABLES:
        value = os.environ.get(variable, "")
        if len(value) >= 4:
            text = text.replace(value, "***")
    return text
