"""Logs of flows and commands: secrets redacted, and JSON with STARLING_LOG=json.

Prefect configures logging when it is imported, in this process and in processes of its workers, so it is configured
through the environment. Prefect's server receives the same lines as before. Secrets are redacted in the records
themselves, since handlers may be added later.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from training.processes.logs import JsonFormatter, redact, wants_json

COPIED = "starling_copied"
"""Attribute of a log record whose line another record of this process has, too: consoles show only the other one."""
_CONSOLE = "PREFECT_LOGGING_HANDLERS_CONSOLE"


class SafeRecord(logging.LogRecord):
    """A log record whose message and traceback have secrets redacted, in any format."""

    _traceback: str | None = None

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        """The message with its arguments."""
        return redact(super().getMessage())

    @property  # type: ignore[override]
    def exc_text(self) -> str | None:
        """The traceback, which formatters cache here."""
        return self._traceback

    @exc_text.setter
    def exc_text(self, text: str | None) -> None:
        self._traceback = redact(text) if text else text


def _keep_secrets_out() -> None:
    """Make every log record of this process a `SafeRecord`, also if another library has its own class of records."""
    kind = logging.getLogRecordFactory()
    if isinstance(kind, type) and not issubclass(kind, SafeRecord):
        logging.setLogRecordFactory(
            SafeRecord if kind is logging.LogRecord else type("SafeRecord", (SafeRecord, kind), {})
        )


@contextmanager
def secrets_kept() -> Iterator[None]:
    """Redact secrets in the message of an error that leaves the block: Prefect's server shows it with the state."""
    try:
        yield
    except Exception as error:
        if redact(str(error)) != str(error):
            error.args = tuple(redact(part) if isinstance(part, str) else part for part in error.args)
            for name in ("message", "strerror", "filename"):
                if isinstance(text := getattr(error, name, None), str):
                    setattr(error, name, redact(text))
        raise


class RunFormatter(JsonFormatter):
    """Adds the flow run to lines that were not logged through Prefect, too."""

    def known(self, record: logging.LogRecord) -> dict[str, str]:
        """Fields of the run that a record belongs to.

        Args:
            record: The log record.
        """
        return {**_running(), **super().known(record)}


class JsonConsole(logging.StreamHandler[TextIO]):
    """JSON replacement for Prefect's console handler; accepts the same arguments.

    Args:
        stream: Output stream; standard error by default.
        **_: Ignored, such as colours.
    """

    def __init__(self, stream: TextIO | None = None, **_: Any) -> None:
        super().__init__(stream)
        self.setFormatter(RunFormatter())

    def setFormatter(self, fmt: logging.Formatter | None) -> None:  # noqa: N802 - logging's name
        """Set a JSON formatter, regardless of the configuration."""
        super().setFormatter(fmt if isinstance(fmt, JsonFormatter) else RunFormatter())


def _running() -> dict[str, str]:
    """Ids and names of the flow run and the task run of this context."""
    module = sys.modules.get("prefect.context")
    if module is None:
        return {}
    fields: dict[str, str] = {}
    flow, task = module.FlowRunContext.get(), module.TaskRunContext.get()
    if flow is not None and flow.flow_run is not None:
        fields |= {"flow_run_id": str(flow.flow_run.id), "flow_run_name": flow.flow_run.name}
    if task is not None:
        fields |= {"task_run_id": str(task.task_run.id), "task_run_name": task.task_run.name}
    return fields


def install() -> bool:
    """Redact secrets in the logs of this process, and configure JSON for it and its children if requested.

    Returns:
        Whether the environment asks for JSON.
    """
    _keep_secrets_out()
    if not wants_json():
        return False
    os.environ[f"{_CONSOLE}_CLASS"] = f"{__name__}.{JsonConsole.__name__}"
    os.environ.setdefault(f"{_CONSOLE}_LEVEL", "INFO")
    root = logging.getLogger()
    configured = [
        root,
        *(logger for logger in logging.Logger.manager.loggerDict.values() if isinstance(logger, logging.Logger)),
    ]
    for logger in configured:
        for handler in [handler for handler in logger.handlers if type(handler).__name__ == "PrefectConsoleHandler"]:
            logger.removeHandler(handler)
            logger.addHandler(JsonConsole())
    if not root.handlers:
        root.addHandler(JsonConsole())
    return True


def show_lines_once() -> None:
    """Leave copies of lines out of this process's consoles; Prefect's server has them in the logs of several runs."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", ())}:
        if hasattr(handler, "console") or isinstance(handler, JsonConsole):
            handler.addFilter(_not_copied)


def _not_copied(record: logging.LogRecord) -> bool:
    return not getattr(record, COPIED, False)


class LogStream:
    """A file object that logs its lines: for a command's messages when logs are JSON.

    Args:
        name: Name of the logger.
    """

    encoding = "utf-8"

    def __init__(self, name: str = "starling") -> None:
        self._logger = logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        if not self._logger.handlers:
            self._logger.addHandler(JsonConsole())
        self._incomplete = ""

    def write(self, text: str) -> int:
        """Log complete lines."""
        *lines, self._incomplete = (self._incomplete + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info(line.strip())
        return len(text)

    def flush(self) -> None:
        """Do nothing: an incomplete line stays buffered."""

    def isatty(self) -> bool:
        """Return False."""
        return False
