"""What a server accepts, and the errors that say that it was too much, as OpenAI's API gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

CLOSED_BY_CLIENT = 499
"""Status in logs and metrics of requests whose client has gone; nobody receives it."""

REFUSED_AUDIO = (
    *("file_too_large", "audio_too_long", "empty_audio", "unsupported_audio", "unreadable_audio"),
    *("bad_audio", "unusable_scores"),
)
"""Codes of errors that are about what a client wants recognized; others are about its request, or the server."""


@dataclass(frozen=True)
class ServeLimits:
    """Limits of size, length, time and number."""

    file_mb: float = 100.0
    """Largest file, in 10⁶ bytes."""
    file_seconds: float = 7200.0
    """Longest recording."""
    uploads_mb: float = 1000.0
    """All files that are being received or recognized, in 10⁶ bytes."""
    waiting: int = 64
    """Files that are being recognized or wait for it."""
    per_client: int = 16
    """Requests and streams of one address at a time."""
    streams: int = 16
    """Streams at a time."""
    connections: int = 512
    """Open connections, idle ones included."""
    request_s: float = 600.0
    """Time for recognition, waiting included."""
    upload_s: float = 300.0
    """Time for receiving a file."""
    idle_s: float = 20.0
    """Longest pause of a client within headers, an upload, or a stream."""
    stream_seconds: float = 4 * 3600.0
    """Longest stream."""
    drain_s: float = 30.0
    """Time for requests and streams in progress after SIGTERM."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 < value < 1e9:  # false for NaN, too
                raise ValueError(f"the limit {limit.name} is {value}: give a positive number")

    @property
    def file_bytes(self) -> int:
        """Largest file."""
        return int(self.file_mb * 1e6)


@dataclass
class ApiError(Exception):
    """A request that is refused, in the form of OpenAI's API."""

    status: int
    message: str
    code: str
    """What went wrong, for programs, logs and metrics."""
    param: str | None = None
    """The field that is wrong."""
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def content(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": error_content(self.status, self.message, self.code, self.param)}


def error_content(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's description of an error."""
    kinds: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": param, "code": code}


def busy(status: int, message: str, code: str) -> ApiError:
    """A refusal of what may be accepted in a second."""
    return ApiError(status, message, code, headers={"Retry-After": "1"})


class ServeAdmission:
    """Counts what is in progress, and refuses what would be too much; used by the event loop's thread only."""

    def __init__(self, limits: ServeLimits) -> None:
        self.limits = limits
        self.clients: Counter[str] = Counter()
        self.files = 0
        """Files that are being recognized or wait for it."""
        self.streams = 0
        self.uploaded = 0
        """Bytes of all files in progress."""

    @contextmanager
    def client(self, address: str) -> Iterator[None]:
        """A request or stream of a client.

        Raises:
            ApiError: It has too many of them, 429.
        """
        if self.clients[address] >= self.limits.per_client:
            raise busy(
                429, f"{self.limits.per_client} requests of yours are in progress: wait for one", "too_many_requests"
            )
        self.clients[address] += 1
        try:
            yield
        finally:
            self.clients[address] -= 1
            if not self.clients[address]:
                del self.clients[address]

    def check_queue(self) -> None:
        """Check that another file may wait.

        Raises:
            ApiError: The queue is full, 503.
        """
        if self.files >= self.limits.waiting:
            raise busy(503, f"{self.files} files are waiting for recognition: try again later", "queue_full")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A file that is recognized or waits for it.

        Raises:
            ApiError: The queue is full, 503.
        """
        self.check_queue()
        self.files += 1
        try:
            yield
        finally:
            self.files -= 1

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A stream.

        Raises:
            ApiError: There are too many of them, 503.
        """
        if self.streams >= self.limits.streams:
            raise busy(503, f"{self.streams} streams are open: try again later", "too_many_streams")
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    @contextmanager
    def upload(self) -> Iterator[Upload]:
        """What one request uploads; forgotten when the request ends."""
        upload = Upload(self)
        try:
            yield upload
        finally:
            self.uploaded -= upload.size


class Upload:
    """Counts the bytes of one request."""

    def __init__(self, admission: ServeAdmission) -> None:
        self._admission = admission
        self.size = 0

    def check(self, size: int) -> None:
        """Check that a body of a size is accepted.

        Raises:
            ApiError: It is too large, 413.
        """
        limits = self._admission.limits
        if size > limits.file_bytes + FORM_BYTES:
            raise ApiError(
                413, f"the file is larger than {limits.file_mb:g} MB: send it in parts, or as FLAC", "file_too_large"
            )

    def add(self, size: int) -> None:
        """Count received bytes.

        Raises:
            ApiError: The body is too large, 413, or all uploads are, 503.
        """
        self.check(self.size + size)
        if self._admission.uploaded + size > self._admission.limits.uploads_mb * 1e6:
            raise busy(503, "other uploads fill the server's memory: try again later", "uploads_full")
        self.size += size
        self._admission.uploaded += size


FORM_BYTES = 64 * 1024
"""What a form may have besides its file: headers, fields, boundaries."""
