"""A log of requests and streams: lines of JSON in files of bounded size, without audio, and by default without text."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from typing_extensions import override

_BYTES, _FILES = 10_000_000, 5
_LONGEST = 300  # characters of a value, such as the reason of an error


class _Handler(RotatingFileHandler):
    @override
    def handleError(self, record: logging.LogRecord) -> None:
        """Go on without the line: a full disk must not stop the server, nor fill its standard error."""


class RequestLog:
    """Writes a line for each request and stream.

    Args:
        path: The file; the five before it are kept as PATH.1 to PATH.5, with 10 MB each. None writes nothing.
        with_text: Whether recognized text is written, too.

    Attributes:
        common: What all lines have.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path | None = None, with_text: bool = False) -> None:
        self.path, self.with_text = path, with_text
        self.common: dict[str, str] = {}
        self._handler: _Handler | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handler = _Handler(path, maxBytes=_BYTES, backupCount=_FILES, encoding="utf-8")

    def write(self, event: str, text: str = "", **values: Any) -> None:
        """Write a line.

        Args:
            event: What happened.
            text: What was recognized; left out unless it is to be logged.
            **values: Numbers and short texts about it; None and empty ones are left out.
        """
        if self._handler is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {"time": now, "event": event, **self.common}
        entry |= {name: _short(value) for name, value in values.items() if value not in (None, "")}
        if self.with_text and text:
            entry["text"] = text
        line = json.dumps(entry, ensure_ascii=False)
        self._handler.handle(logging.LogRecord("serve", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    return value if not isinstance(value, str) or len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
