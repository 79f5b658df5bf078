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
)
_PASSING_BOTOCORE_ERRORS = frozenset(
    {"HTTPClientError", "ConnectionError", "IncompleteReadError", "ResponseParserError"}
)
_OWN_PACKAGES = ("flows", "tasks", "training", "speech", "storage", "typer", "click")
"""Packages whose exceptions already explain themselves, or are not errors (a command's exit)."""
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


class ObjectStoreError(OSError):
    """A storage call failed permanently; the message contains the object's URL and the remedy."""


class DiskError(ObjectStoreError):
    """A local disk is full, read-only or not writable for this user; the message names it and the remedy."""


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


def s3_code(error: BaseException | None) -> str:
    """The S3 error code of an exception or its cause ("NoSuchBucket", "503", ...), or ""."""
    for candidate in (error, getattr(error, "__cause__", None)):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            return str(response["Error"].get("Code", ""))
    return ""


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if s3_code(error) in _PASSING_S3_CODES:
        return True
    if isinstance(error, _LASTING_TYPES):
        return False
    if isinstance(error, OSError):  # includes ConnectionError and TimeoutError
        return error.errno not in _LASTING_ERRNOS
    package = type(error).__module__.partition(".")[0]
    if package in {"botocore", "aiobotocore"}:
        names = {cls.__name__ for cls in type(error).__mro__}
        return bool(names & _PASSING_BOTOCORE_ERRORS) or _http_status(error) >= 500
    return package in {"aiohttp", "urllib3"}


def _http_status(error: BaseException) -> int:
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return 0
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_storage_failure(error: BaseException) -> bool:
    """Whether an exception comes from the storage, as opposed to a bug in our code."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or package in {"botocore", "aiobotocore", "aiohttp", "urllib3"}


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
        ours = type(error).__module__.partition(".")[0] in _OWN_PACKAGES
        number = 0 if ours else disk_trouble(error, folders)
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
    cause = redact(f"{type(error).__name__}: {error}")
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    kind = ObjectMissingError if isinstance(error, FileNotFoundError) else ObjectStoreError
    failure = kind(f"{url}: failed{tries} ({cause}). {_remedy(error, url)}")
    failure.errno = getattr(error, "errno", None)
    return failure


def _remedy(error: BaseException, url: str) -> str:
    remote = url.startswith("s3://")
    names = {cls.__name__ for cls in type(error).__mro__}
    if s3_code(error) == "NoSuchBucket":
        return "Create the bucket first, or correct its name in the URL."
    if names & {"NoCredentialsError", "PartialCredentialsError"}:
        return "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment."
    if isinstance(error, PermissionError):
        if remote:
            return "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the rights of that key."
        return "Check the owner and the mode of the folder."
    if isinstance(error, FileNotFoundError):
        return "Check the name, or run the stage that writes it."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "Free some space there and run again: finished shards are kept."
    if remote and is_transient(error):
        return "Check that the server runs and that AWS_ENDPOINT_URL names it, then run again: finished work is kept."
    return "Check the URL and the storage, then run again: finished work is kept."


def redact(text: str) -> str:
    """Replace the values of the credential variables by asterisks."""
    for variable in _SECRET_VARIABLES:
        value = os.environ.get(variable, "")
        if len(value) >= 4:
            text = text.replace(value, "***")
    return text
