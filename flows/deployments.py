"""Deployments: which flows run by themselves, when, and with what."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flows
from tasks.config import PipelineConfig
from tasks.nodes import QUEUE

POOL = "starling"
"""Work pool whose worker runs flows as processes."""
DEFAULT_QUEUE = "default"
"""Work queue of everything but nodes; every pool has it."""
FOLDS = 5
"""Folds of the cross-validation that a deployment runs, unless the configuration or its parameter says otherwise."""


@dataclass(frozen=True)
class Scheduled:
    """A flow and when it runs."""

    flow: str
    cron: str
    about: str
    module: str = "pipeline"
    """Module of flows/ that has the flow."""


SCHEDULED = (
    Scheduled("pipeline", "15 2 * * *", "Every night: whatever has changed, from the corpus to the registry."),
    Scheduled("evaluate", "5 * * * *", "Every hour: decode, score and register what is new."),
    Scheduled("ingest", "", "On demand: corpora, shards and features."),
    Scheduled("train", "", "On demand: train, ingesting first if needed."),
    Scheduled("crossvalidate", "", "On demand: train and score every fold.", module="folds"),
)


def deploy(config: PipelineConfig, timezone: str = "UTC") -> list[dict[str, Any]]:
    """Register every deployment of a configuration with the Prefect server.

    Args:
        config: Becomes the deployments' `config` parameter, which the UI shows as a form.
        timezone: Of the schedules.

    Returns:
        Name, schedule and id of each.
    """
    from prefect.flows import Flow

    _make_pool(POOL)
    root = Path(flows.__file__).resolve().parent.parent
    done: list[dict[str, Any]] = []
    for item in SCHEDULED:
        loaded: Any = Flow.from_source(source=str(root), entrypoint=f"flows/{item.module}.py:{item.flow}")
        identity = loaded.deploy(
            name=config.name,
            work_pool_name=POOL,
            parameters=_parameters(item, config),
            schedules=[_cron(item.cron, timezone)] if item.cron else [],
            description=item.about,
            tags=["starling", config.model.kind],
            print_next_steps=False,
            ignore_warnings=True,
        )
        done.append({"deployment": f"{item.flow}/{config.name}", "schedule": item.cron or None, "id": str(identity)})
    if config.train.launch.kind == "prefect":
        done.append(_deploy_node(config, root))
    return done


def _parameters(item: Scheduled, config: PipelineConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = {"config": config.model_dump(mode="json", by_alias=True)}
    return parameters | {"folds": config.data.folds or FOLDS} if item.module == "folds" else parameters


def _deploy_node(config: PipelineConfig, root: Path) -> dict[str, Any]:
    """The deployment that the train stage asks for runs of, one for each node."""
    from prefect.flows import Flow

    pool = config.train.launch.pool
    _make_pool(pool, QUEUE)
    loaded: Any = Flow.from_source(source=str(root), entrypoint="flows/node.py:node")
    identity = loaded.deploy(
        name=config.name,
        work_pool_name=pool,
        work_queue_name=QUEUE,
        description="By the train flow: one node of the ring.",
        tags=["starling", config.train.strategy],
        print_next_steps=False,
        ignore_warnings=True,
    )
    return {"deployment": f"node/{config.name}", "schedule": None, "id": str(identity)}


def _cron(cron: str, timezone: str) -> Any:
    from prefect.client.schemas.schedules import CronSchedule

    return CronSchedule(cron=cron, timezone=timezone)


def _make_pool(name: str, queue: str = "") -> None:
    """A work pool for processes, and a queue of it, unless they are there."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with get_client(sync_client=True) as api:
        with suppress(ObjectAlreadyExists):
            api.create_work_pool(WorkPoolCreate(name=name, type="process"))
        if queue:
            with suppress(ObjectAlreadyExists):
                api.create_work_queue(name=queue, work_pool_name=name)
