"""Logs: readable lines, or one JSON object per line with STARLING_LOG=json; secrets are removed.

Every process of a training calls `setup` first; `tasks.orchestration.logs` does the same for flows and commands.
"""

import base64
import json
import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

VARIABLE = "STARLING_LOG"
JSON = "json"
HIDDEN = "***"
_SECRET_NAME = re.compile(r"SECRET|PASSWORD|PASSWD|AUTH_STRING|TOKEN|PRIVATE_KEY|ACCESS_KEY|API_KEY|PGPASS|NOTIFY_URL")
_NO_SECRET = re.compile(r"_(FILE|PATH|FOLDER|DIR)$|^STARLING_SECRETS$")
_SHORTEST = 6  # shorter values would match unrelated words
_IN_URL = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]*(?=@)")
_IN_HEADER = re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer)\s+)[\w+/=.~-]+")
_IN_QUERY = re.compile(r"(?i)([?&](?:x-amz-signature|x-amz-security-token|x-amz-credential|token|password)=)[^&\s\"']+")
_PREFECT_FIELDS = ("flow_run_id", "flow_run_name", "flow_name", "task_run_id", "task_run_name")
_fields: ContextVar[Mapping[str, str] | None] = ContextVar("starling_log_fields", default=None)


def wants_json() -> bool:
    """Whether the environment asks for JSON logs."""
    return os.environ.get(VARIABLE, "").lower() == JSON


@contextmanager
def fields(**values: str) -> Iterator[None]:
    """Add fields, such as run and stage, to all log records of the block."""
    token = _fields.set({**(_fields.get() or {}), **values})
    try:
        yield
    finally:
        _fields.reset(token)


def redact(text: str) -> str:
    """Remove the secrets of this process's environment, and credentials in URLs and headers, from a text.

    Args:
        text: The text to log.
    """
    for secret in _secrets():
        if secret in text:
            text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _IN_QUERY.sub(rf"\g<1>{HIDDEN}", _IN_URL.sub(HIDDEN, text))
    return _IN_HEADER.sub(rf"\g<1>{HIDDEN}", text)


def _secrets() -> list[str]:
    """Values of environment variables with secret-like names, plain and in base64 (for HTTP headers), longest first."""
    secrets = set()
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name.upper()) and not _NO_SECRET.search(name.upper()):
            secrets |= {value, base64.b64encode(value.encode()).decode()}
            if "AUTH_STRING" in name.upper():  # user:password
                secrets |= {part for part in value.split(":")[1:] if len(part) >= _SHORTEST}
    return sorted(secrets, key=len, reverse=True)


class PlainFormatter(logging.Formatter):
    """Formats records as readable lines without secrets."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formats records as one JSON object per line: time, level, logger, message, process, and fields of the run."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redact(record.getMessage()),
            "pid": record.process,
        }
        entry |= self.known(record)
        if record.exc_info and record.exc_info[0]:
            entry["error"] = record.exc_info[0].__name__
            entry["traceback"] = redact("".join(traceback.format_exception(*record.exc_info)))
        return json.dumps(entry, ensure_ascii=False, default=str)

    def known(self, record: logging.LogRecord) -> dict[str, str]:
        """Known fields of the run that a record belongs to.

        Args:
            record: The log record.
        """
        given = {name: str(record.__dict__[name]) for name in _PREFECT_FIELDS if record.__dict__.get(name)}
        return {**(_fields.get() or {}), **given}


def setup(about: str = "", **values: str) -> None:
    """Set up logging to standard error, in the format that the environment requests.

    Args:
        about: Name of the process in readable lines, between time and level, such as `coordinator`.
        **values: Fields of every JSON line of this process, such as its rank.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if wants_json() else PlainFormatter(_plain(about)))
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    _fields.set({**(_fields.get() or {}), **values})


def _plain(about: str) -> str:
    return f"%(asctime)s {about}{' ' if about else ''}%(levelname)s %(message)s"
