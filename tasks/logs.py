"""Logs of flows and commands: without secrets, and as JSON on request: STARLING_LOG=json.

Prefect configures logging when it is imported, in this process and in those that its workers start; so what is wanted
is told to it through the environment. The same lines go to Prefect's server as ever. Secrets are taken out of the
records themselves, since handlers may be added later.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from training.logs import JsonFormatter, redact, wants_json

_CONSOLE = "PREFECT_LOGGING_HANDLERS_CONSOLE"


class SafeRecord(logging.LogRecord):
    """A record whose message and traceback come without secrets, in any format."""

    _traceback: str | None = None

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        """The message with its arguments."""
        return redact(super().getMessage())

    @property  # type: ignore[override]
    def exc_text(self) -> str | None:
        """The traceback, which formatters keep here."""
        return self._traceback

    @exc_text.setter
    def exc_text(self, text: str | None) -> None:
        self._traceback = redact(text) if text else text


def _keep_secrets_out() -> None:
    """Let every record of this process be a safe one, also where another library has records of its own kind."""
    kind = logging.getLogRecordFactory()
    if isinstance(kind, type) and not issubclass(kind, SafeRecord):
        logging.setLogRecordFactory(
            SafeRecord if kind is logging.LogRecord else type("SafeRecord", (SafeRecord, kind), {})
        )


@contextmanager
def secrets_kept() -> Iterator[None]:
    """Take secrets out of the message of an error that leaves the block: Prefect's server shows it with the state."""
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
    """Knows the flow run also of lines that were not logged through Prefect."""

    def known(self, record: logging.LogRecord) -> dict[str, str]:
        """Fields of the run that a record belongs to.

        Args:
            record: What is logged.
        """
        return {**_running(), **super().known(record)}


class JsonConsole(logging.StreamHandler[TextIO]):
    """Takes the place of Prefect's console, with its arguments.

    Args:
        stream: Where to; standard error by default.
        **_: Colours and the like.
    """

    def __init__(self, stream: TextIO | None = None, **_: Any) -> None:
        super().__init__(stream)
        self.setFormatter(RunFormatter())

    def setFormatter(self, fmt: logging.Formatter | None) -> None:  # noqa: N802 - logging's name
        """Keep to JSON, regardless of the configuration."""
        super().setFormatter(fmt if isinstance(fmt, JsonFormatter) else RunFormatter())


def _running() -> dict[str, str]:
    """The flow and the task that run in this context."""
    module = sys.modules.get("prefect.context")
    if module is None:
        return {}
    found: dict[str, str] = {}
    flow, task = module.FlowRunContext.get(), module.TaskRunContext.get()
    if flow is not None and flow.flow_run is not None:
        found |= {"flow_run_id": str(flow.flow_run.id), "flow_run_name": flow.flow_run.name}
    if task is not None:
        found |= {"task_run_id": str(task.task_run.id), "task_run_name": task.task_run.name}
    return found


def install() -> bool:
    """Keep secrets out of the logs of this process; make them, and those of processes that it starts, JSON on request.

    Returns:
        Whether the environment asks for JSON.
    """
    _keep_secrets_out()
    if not wants_json():
        return False
    os.environ[f"{_CONSOLE}_CLASS"] = f"{__name__}.{JsonConsole.__name__}"
    os.environ.setdefault(f"{_CONSOLE}_LEVEL", "INFO")
    root = logging.getLogger()
    configured = [root, *(one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger))]
    for logger in configured:
        for handler in [one for one in logger.handlers if type(one).__name__ == "PrefectConsoleHandler"]:
            logger.removeHandler(handler)
            logger.addHandler(JsonConsole())
    if not root.handlers:
        root.addHandler(JsonConsole())
    return True


class LogStream:
    """A file whose lines are logged: for what a command tells its user, where logs are read by programs.

    Args:
        name: The logger's.
    """

    encoding = "utf-8"

    def __init__(self, name: str = "starling") -> None:
        self._logger = logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        if not self._logger.handlers:
            self._logger.addHandler(JsonConsole())
        self._begun = ""

    def write(self, text: str) -> int:
        """Log the lines that are complete."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info(line.strip())
        return len(text)

    def flush(self) -> None:
        """Buffers a line until it is complete."""

    def isatty(self) -> bool:
        """No."""
        return False
