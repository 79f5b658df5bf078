"""Prefect automations for runs without heartbeat, failed runs, changed corpora, and events about models.

`starling deploy` creates or updates them; each is identified by its name, which starts with "starling: ". The Prefect
server evaluates them, so they work even if no worker runs.
"""

import json
from typing import Any

from flows.deploy.deployments import DEPLOYED_TAG, HEARTBEAT_S
from flows.names import TAG
from tasks.config.pipeline import PipelineConfig
from tasks.orchestration.events import PROMOTED, RECOGNITION_CHANGED, ROLLED_BACK

PREFIX = "starling: "
SILENCE_S = 3 * HEARTBEAT_S
"""Seconds without a heartbeat after which a run is marked as crashed."""
_ONCE_S = 60
"""Seconds in which a run's failures are notified once."""
CORPUS_CHANGED = "starling.corpus-changed"
NOTIFIED_EVENTS = (PROMOTED, ROLLED_BACK, RECOGNITION_CHANGED)
WEBHOOK_BLOCK = "starling-notify"
HEARTBEAT = "prefect.flow-run.heartbeat"
# names of final and paused states, including our own; a run in one of them sends no heartbeats
QUIET_STATES = (
    *("Completed", "Failed", "Crashed", "Cancelled", "TimedOut", "Paused", "Suspended"),
    *("Cached", "Stopped", "Skipped", "NothingWaits", "Unchanged", "Settling", "Changed", "Empty", "TooFew"),
)
CRASHED_MESSAGE = f"no heartbeat for {SILENCE_S} s: its process or its machine has died"

_PAYLOAD = """{
  "event": {{ event.event | tojson }},
  "text": {{ TEXT | tojson }},
  "name": {{ NAME | tojson }},
  "state": {{ STATE | tojson }},
  "message": {{ MESSAGE | tojson }},
  "url": {{ URL | tojson }},
  "occurred": {{ event.occurred | string | tojson }}
}"""


def _payload(**expressions: str) -> str:
    text = _PAYLOAD
    for name, expression in expressions.items():
        text = text.replace(name, expression)
    return text


RUN_PAYLOAD = _payload(
    TEXT='(event.resource["prefect.resource.name"] ~ ": " ~ event.resource["prefect.state-name"])',
    NAME='event.resource["prefect.resource.name"]',
    STATE='event.resource["prefect.state-name"]',
    MESSAGE='event.resource.get("prefect.state-message", "")',
    URL="(flow_run | ui_url)",
)
"""Payload of the webhook about a run: a JSON object; chat systems need only `text`."""
MODEL_PAYLOAD = _payload(
    TEXT='(event.event ~ ": " ~ event.resource["prefect.resource.name"])',
    NAME='event.resource["prefect.resource.name"]',
    STATE='(event.event.split(".") | last)',
    MESSAGE="(event.payload | tojson)",
    URL='event.payload.get("url", "")',
)
"""Payload of the webhook about a model; `message` is the event's payload as text."""


def heartbeat_automation() -> dict[str, Any]:
    """Sets a run without heartbeats to Crashed; a retry then resumes it.

    Applies only to runs with our tag: other runs on the same server may send heartbeats less often.
    """
    trigger = {
        "type": "event",
        "posture": "Proactive",
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": _tagged(TAG),
        "for_each": ["prefect.resource.id"],
        "after": [HEARTBEAT],  # excludes runs that wait to be started
        "expect": [HEARTBEAT, *(f"prefect.flow-run.{name}" for name in QUIET_STATES)],
        "threshold": 1,
        "within": SILENCE_S,
    }
    action = {"type": "change-flow-run-state", "state": "CRASHED", "name": "Crashed", "message": CRASHED_MESSAGE}
    return _automation("a silent run has crashed", f"No heartbeat for {SILENCE_S} s.", trigger, action)


def corpus_automation(config: PipelineConfig, deployment: str) -> dict[str, Any]:
    """Runs `ingest` when a corpus is reported as changed.

    Args:
        config: The configuration with the corpus.
        deployment: Id of its `ingest` deployment.
    """
    trigger = {
        "type": "event",
        "posture": "Reactive",
        "match": {"prefect.resource.id": corpus_resource(config.name)},
        "expect": [CORPUS_CHANGED],
        "threshold": 1,
        # the first of several announcements counts; later changes are found by the next run of `watch`
        "within": 60,
    }
    action = {"type": "run-deployment", "source": "selected", "deployment_id": deployment}
    about = f"{CORPUS_CHANGED} of {config.name}."
    return _automation(f"ingest {config.name} when its corpus changes", about, trigger, action)


def notifications(block: str) -> list[dict[str, Any]]:
    """Call a webhook about runs that fail or crash, about new champions, and about recognition that has changed.

    Args:
        block: Id of the Webhook block, which contains the address.
    """
    run = {
        "type": "event",
        "posture": "Reactive",
        "match": {"prefect.resource.id": "prefect.flow-run.*", "prefect.state-type": ["FAILED", "CRASHED"]},
        "match_related": _tagged(DEPLOYED_TAG),
        "for_each": ["prefect.resource.id"],
        "expect": ["prefect.flow-run.*"],
        "threshold": 1,
        "within": _ONCE_S,  # not 0: the server may evaluate an event twice, and a failed run may also crash
    }
    model = {
        "type": "event",
        "posture": "Reactive",
        "match": {"prefect.resource.id": "starling.model.*"},
        "for_each": ["prefect.resource.id"],
        "expect": list(NOTIFIED_EVENTS),
        "threshold": 1,
        "within": 1,  # the same event only: a roll-back may follow soon
    }
    call = {"type": "call-webhook", "block_document_id": block}
    return [
        _automation("tell of failed and crashed runs", "Calls a webhook.", run, call | {"payload": RUN_PAYLOAD}),
        _automation("tell of champions", "Calls a webhook.", model, call | {"payload": MODEL_PAYLOAD}),
    ]


def corpus_resource(name: str) -> str:
    """Resource id of the events about a configuration's corpus."""
    return f"starling.corpus.{name}"


def _tagged(*tags: str) -> dict[str, Any]:
    return {"prefect.resource.id": [f"prefect.tag.{tag}" for tag in tags], "prefect.resource.role": "tag"}


def _automation(name: str, about: str, trigger: dict[str, Any], action: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": PREFIX + name,
        "description": about,
        "tags": [TAG],
        "enabled": True,
        "trigger": trigger,
        "actions": [action],
    }


def apply(configs: list[PipelineConfig], deployed: list[dict[str, Any]], notify_url: str = "") -> list[str]:
    """Create the automations, or update existing ones; one that was switched off stays off.

    Args:
        configs: The configurations that were deployed.
        deployed: Results of `flows.deploy.deployments.deploy`.
        notify_url: Webhook for notifications; stored only in an encrypted block. Empty keeps the current one; without
            any, no notification is sent.

    Returns:
        Names of the automations.
    """
    from prefect.client.orchestration import get_client

    identities = {str(entry["deployment"]): str(entry["id"]) for entry in deployed}
    wanted = [heartbeat_automation()]
    wanted += [corpus_automation(config, identities[f"ingest/{config.name}"]) for config in configs]
    block = _webhook(notify_url)
    wanted += notifications(block) if block else []
    with get_client(sync_client=True) as api:
        for automation in wanted:
            _put(api, automation)
    return [automation["name"] for automation in wanted]


def _put(api: Any, wanted: dict[str, Any]) -> None:
    from prefect.events.schemas.automations import AutomationCore

    same, *more = api.read_automations_by_name(wanted["name"]) or [None]
    for double in more:
        api.delete_automation(double.id)
    if same is None:
        api.create_automation(AutomationCore.model_validate(wanted))
    elif not _is(same, wanted):
        # an update resets the trigger's state, so an unchanged automation is not updated
        api.update_automation(same.id, AutomationCore.model_validate(wanted | {"enabled": same.enabled}))


def _is(existing: Any, wanted: dict[str, Any]) -> bool:
    """Whether an automation equals the wanted one, apart from fields that the server adds."""
    from prefect.events.schemas.automations import AutomationCore

    def plain(automation: Any) -> str:
        fields = ("name", "description", "tags", "trigger", "actions")
        dumped = automation.model_dump(mode="json", include=set(fields))
        return json.dumps(_sorted(dumped), sort_keys=True)

    return plain(existing) == plain(AutomationCore.model_validate(wanted))


def _sorted(value: Any) -> Any:
    """Normalize JSON for a comparison: drop ids of triggers, and sort lists, which are sets."""
    if isinstance(value, dict):
        return {name: _sorted(item) for name, item in value.items() if name != "id"}
    if isinstance(value, list):
        return sorted((_sorted(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


def _webhook(url: str) -> str:
    """Save the address, if given, and return the id of its block; empty if there is none."""
    from prefect.blocks.webhook import Webhook
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    if url:
        block: Any = Webhook(url=url, headers={"Content-Type": "application/json"})
        return str(block.save(WEBHOOK_BLOCK, overwrite=True, _sync=True))
    with get_client(sync_client=True) as api:
        try:
            return str(api.read_block_document_by_name(WEBHOOK_BLOCK, "webhook").id)
        except ObjectNotFound:
            return ""
