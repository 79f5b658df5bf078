"""The flow `watch`: checks whether the sources of a configuration have changed, and starts `ingest` if so.

A check costs a listing: names, sizes and times of files and objects. Files that are still being copied are left alone:
`ingest` starts only when two checks in a row find the same listing. Each state of the sources is ingested once.
"""

import hashlib
import json
import re
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from prefect.deployments import run_deployment
from prefect.logging import get_run_logger
from prefect.states import Completed
from prefect.variables import Variable

from flows.definition import flow
from flows.deploy.automations import CORPUS_CHANGED, corpus_resource
from flows.deploy.concurrency import in_turn
from flows.names import stamped_name
from storage.objects import ObjectStore
from tasks.config.credentials import export_credentials
from tasks.config.pipeline import PipelineConfig
from tasks.stages.sources import open_source

INGEST = "ingest"
_SEEN, _INGESTED = "seen", "ingested"


def look(config: PipelineConfig, prefixes: list[str]) -> str:
    """SHA-256 of the current listing of the sources and of folders of object stores.

    Args:
        config: Configuration with the sources and the stores' credentials.
        prefixes: URLs of the folders, such as s3://bucket/incoming.
    """
    export_credentials(config.storage)
    parts: list[Any] = [open_source(source).fingerprint() for source in config.data.sources]
    for url in prefixes:
        entries = ObjectStore(url).entries()
        parts.append([url, sorted((entry.path, entry.size, entry.modified) for entry in entries)])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def waiting(config: PipelineConfig) -> bool:
    """Whether a challenger of the configuration's model waits for its evaluation.

    Args:
        config: Configuration that names the model.
    """
    from tasks.tracking.registry import waiting_challenger
    from tasks.tracking.runs import client

    return waiting_challenger(client(), config.model_name) is not None


def decide(digest: str, state: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Decide whether to ingest.

    Args:
        digest: Digest of the current listing.
        state: State stored by the previous check.

    Returns:
        Name of the outcome (`Unchanged`, `Settling` or `Changed`), and the new state.
    """
    if digest == state.get(_INGESTED):
        return "Unchanged", {**state, _SEEN: digest}
    if digest != state.get(_SEEN):
        return "Settling", {**state, _SEEN: digest}
    return "Changed", {_SEEN: digest, _INGESTED: digest}


@flow(name="watch", flow_run_name=stamped_name("watch {config.name}"), persist_result=False)
@in_turn
def watch(config: PipelineConfig, prefixes: list[str] = []) -> Any:  # noqa: B006 - Prefect copies what it passes
    """Start `ingest` if the sources have changed and settled.

    Args:
        config: The pipeline's configuration.
        prefixes: Folders of object stores to check as well, such as s3://bucket/incoming; for tables that refer to
            audio there.
    """
    name = variable_name(config.name)
    outcome, state = decide(look(config, prefixes), _recall(name))
    get_run_logger().info("%s: %s", config.name, outcome)
    if outcome == "Changed":
        # the key makes the run idempotent: nothing is lost or repeated if this is killed before the state is stored
        key = f"{config.name}-{state[_INGESTED]}"
        run: Any = run_deployment(f"{INGEST}/{config.name}", timeout=0, idempotency_key=key, as_subflow=False)
        _note(name, state)
        return Completed(name=outcome, message=f"the sources have changed: {run.name} ingests them")
    _note(name, state)
    settling = "the sources are changing; they are ingested once two checks in a row find the same"
    return Completed(name=outcome, message=settling if outcome == "Settling" else "the sources have not changed")


def announce(name: str) -> None:
    """Tell the Prefect server that a configuration's corpus has changed; an automation then starts `ingest`.

    Args:
        name: The configuration's name.
    """
    from prefect.client.orchestration import get_client

    resource = {"prefect.resource.id": corpus_resource(name), "prefect.resource.name": name}
    event = {
        "event": CORPUS_CHANGED,
        "occurred": datetime.now(UTC).isoformat(),
        "id": str(uuid4()),
        "resource": resource,
    }
    with get_client(sync_client=True) as api:  # a request is acknowledged, unlike the event queue
        api.request("POST", "/events", json=[event]).raise_for_status()


def variable_name(name: str) -> str:
    """Name of the Prefect variable with the state of a configuration's sources."""
    return "starling_watch_" + re.sub(r"[^a-z0-9]", "_", name.lower())


def _recall(name: str) -> dict[str, str]:
    value: Any = Variable.get(name, default=None)
    return dict(value) if isinstance(value, dict) else {}


def _note(name: str, state: dict[str, str]) -> None:
    values: Any = Variable  # its types do not allow a plain dict
    values.set(name, state, overwrite=True)
