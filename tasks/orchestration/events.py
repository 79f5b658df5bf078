"""Events about models: a promotion, a rollback, or recognition that is not as on the test sets.

They are for Prefect's automations; a file of the data folder has them, too, also without a Prefect server.
"""

import logging
import os
import threading
from pathlib import Path
from typing import Any

from recognition.serving.log import RequestLog
from tasks.config.home import home

PROMOTED = "starling.promoted"
ROLLED_BACK = "starling.rolled-back"
RECOGNITION_CHANGED = "starling.recognition-changed"
_PATIENCE_S = 10.0
_log = logging.getLogger(__name__)


def emit(event: str, model: str, payload: dict[str, Any]) -> bool:
    """Note an event about a model, and send it to the Prefect server. A failure is logged and does not affect the run.

    Args:
        event: Name, such as `starling.promoted`.
        model: Registered model; the event's resource is `starling.model.NAME`.
        payload: JSON values.

    Returns:
        Whether the event was sent; False without a configured server.
    """
    _note(event, model, payload)
    if not os.environ.get("PREFECT_API_URL"):
        return False
    try:
        from prefect.events import emit_event
        from prefect.events.worker import EventsWorker

        resource = {"prefect.resource.id": f"starling.model.{model}", "prefect.resource.name": model}
        emit_event(event=event, resource=resource, payload=payload)
        # a command may end right after this, and would lose what is in the worker's queue
        sent = threading.Thread(target=EventsWorker.instance().wait_until_empty, daemon=True)
        sent.start()
        sent.join(_PATIENCE_S)
    except Exception as error:
        _log.warning("the event %s of %s was not sent: %s", event, model, error)
        return False
    return True


def events_path() -> Path:
    """Path of the file with this data folder's events: a line of JSON each, of bounded size."""
    return home() / "logs" / "events.jsonl"


def _note(event: str, model: str, payload: dict[str, Any]) -> None:
    try:
        lines = RequestLog(events_path())
        lines.write(event, model=model, **payload)
        lines.close()
    except OSError as error:
        _log.warning("the event %s of %s was not noted: %s", event, model, error)
