"""Prefect events for automations: a promotion, or a rollback."""

import logging
import os
import threading
from typing import Any

PROMOTED = "starling.promoted"
ROLLED_BACK = "starling.rolled-back"
_PATIENCE_S = 10.0
_log = logging.getLogger(__name__)


def emit(event: str, model: str, payload: dict[str, Any]) -> bool:
    """Send an event about a model to the Prefect server. A failure is logged and does not affect the run.

    Args:
        event: Name, such as `starling.promoted`.
        model: Registered model; the event's resource is `starling.model.NAME`.
        payload: JSON values.

    Returns:
        Whether the event was sent; False without a configured server.
    """
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
