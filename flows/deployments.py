"""Deployments: which flows run by themselves, when, and with what."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flows
from tasks.config import PipelineConfig

POOL = "starling"
"""Work pool whose worker runs flows as processes."""


@dataclass(frozen=True)
class Scheduled:
    """A flow and when it runs."""

    flow: str
    cron: str
    about: str


SCHEDULED = (
    Scheduled("pipeline", "15 2 * * *", "Every night: whatever has changed, from the corpus to the registry."),
    Scheduled("evaluate", "5 * * * *", "Every hour: decode, score and register what is new."),
    Scheduled("ingest", "", "On demand: corpora, shards and features."),
    Scheduled("train", "", "On demand: train, ingesting first if needed."),
)


def deploy(config: PipelineConfig, timezone: str = "UTC") -> list[dict[str, Any]]:
    """Register every deployment of a configuration with the Prefect server.

    Args:
        config: Becomes the deployments' `config` parameter, which the UI shows as a form.
        timezone: Of the schedules.

    Returns:
        Name, schedule and id of each.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.flows import Flow

    with get_client(sync_client=True) as api, suppress(ObjectAlreadyExists):
        api.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    root = Path(flows.__file__).resolve().parent.parent
    done: list[dict[str, Any]] = []
    for item in SCHEDULED:
        loaded: Any = Flow.from_source(source=str(root), entrypoint=f"flows/pipeline.py:{item.flow}")
        identity = loaded.deploy(
            name=config.name,
            work_pool_name=POOL,
            parameters={"config": config.model_dump(mode="json", by_alias=True)},
            schedules=[CronSchedule(cron=item.cron, timezone=timezone)] if item.cron else [],
            description=item.about,
            tags=["starling", config.model.kind],
            print_next_steps=False,
            ignore_warnings=True,
        )
        done.append({"deployment": f"{item.flow}/{config.name}", "schedule": item.cron or None, "id": str(identity)})
    return done
