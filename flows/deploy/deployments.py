"""Deployments: flows with their schedules, work pools and parameters.

`plan` returns them as data, which `prefect_yaml` prints; `deploy` registers them at a Prefect server and is idempotent.
"""

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import flows
from flows.deploy.pools import DEFAULT_QUEUE, IMAGE_FOLDER, POOL, WorkPool, make_pool
from flows.names import TAG
from tasks.config.pipeline import PipelineConfig
from tasks.orchestration.nodes import QUEUE

__all__ = ["DEFAULT_QUEUE", "FOLDS", "POOL", "SCHEDULED", "Options", "Scheduled", "deploy", "plan", "prefect_yaml"]

FOLDS = 5
"""Default number of folds of a deployed cross-validation."""
DEPLOYED_TAG = "starling-deployed"
"""Tag of the runs that a webhook is called about: those of deployments, but not nested ones, nodes or a terminal's."""
HEARTBEAT_S = 30
"""Seconds between heartbeats of a run; Prefect's minimum."""
SCHEDULE_SLUG = "starling"


@dataclass(frozen=True)
class Scheduled:
    """A flow and its schedule."""

    flow: str
    cron: str
    about: str
    module: str = "pipeline"
    """Module in flows/ that contains the flow."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters besides the configuration."""

    @property
    def function(self) -> str:
        """Name of the flow's function."""
        return self.flow.replace("-", "_")

    @property
    def entrypoint(self) -> str:
        """Entry point for workers, relative to the folder that contains the packages."""
        return f"flows/{self.module}.py:{self.function}"

    def load(self) -> Any:
        """Import the flow."""
        return getattr(importlib.import_module(f"flows.{self.module}"), self.function)


SCHEDULED = (
    Scheduled("pipeline", "15 2 * * *", "Every night: run all stages whose inputs have changed."),
    Scheduled(
        "evaluate",
        "5 * * * *",
        "Every hour, if a challenger waits: decode, score and decide on its promotion.",
        parameters={"only_waiting": True},
    ),
    Scheduled("watch", "*/10 * * * *", "Every ten minutes: run ingest if the sources have changed.", module="watch"),
    Scheduled(
        "monitor", "30 6 * * *", "Every morning: compare what servers recognize with the test sets.", module="monitor"
    ),
    Scheduled("ingest", "", "When the sources have changed, and on demand: corpora, shards and features."),
    Scheduled("train", "", "On demand: train, ingesting first if needed."),
    Scheduled("crossvalidate", "", "On demand: train and score every fold.", module="folds"),
    Scheduled(
        "search", "", "On demand: search for better values of fields, as the section search says.", module="search"
    ),
    Scheduled("promote", "", "On demand: compare challenger and champion, and move @champion.", module="promote"),
    Scheduled(
        "verify-storage", "30 4 * * 0", "Every Sunday: compare every stored shard with its index.", module="verify"
    ),
)
_NODE = Scheduled("node", "", "Started by the train flow: one node of the ring.", module="node")


@dataclass(frozen=True)
class Options:
    """Options of deployments besides the configuration."""

    pool: WorkPool = field(default_factory=WorkPool)
    timezone: str = "UTC"
    """Time zone of the schedules."""
    watched: tuple[str, ...] = ()
    """Folders of object stores that `watch` checks besides the sources."""


def plan(config: PipelineConfig, options: Options = Options()) -> list[dict[str, Any]]:
    """Every deployment of a configuration, in the form of prefect.yaml's `deployments`.

    Args:
        config: Becomes the deployments' `config` parameter, which the UI shows as a form.
        options: Pool, time zone and watched folders.
    """
    document = config.model_dump(mode="json", by_alias=True)  # a shared object, which YAML writes once
    places = [(item, options.pool.name, DEFAULT_QUEUE) for item in SCHEDULED]
    if config.train.launch.kind == "prefect":
        places.append((_NODE, config.train.launch.pool, QUEUE))
    return [
        _entry(item, config, options, pool, queue) | {"parameters": _parameters(item, document, config, options)}
        for item, pool, queue in places
    ]


def _entry(item: Scheduled, config: PipelineConfig, options: Options, pool: str, queue: str) -> dict[str, Any]:
    schedule = {"cron": item.cron, "timezone": options.timezone, "slug": SCHEDULE_SLUG}
    return {
        "name": config.name,
        "description": item.about,
        "tags": [
            *([TAG] if item is _NODE else [TAG, DEPLOYED_TAG]),
            *(config.model.kind, config.train.strategy.kind),
        ],
        "entrypoint": item.entrypoint,
        "parameters": {},
        "schedules": [schedule] if item.cron else [],
        "work_pool": {"name": pool, "work_queue_name": queue, "job_variables": options.pool.job_variables(HEARTBEAT_S)},
    }


def _parameters(item: Scheduled, document: dict[str, Any], config: PipelineConfig, options: Options) -> dict[str, Any]:
    if item is _NODE:  # the train flow sets them
        return {}
    given: dict[str, Any] = {"config": document, **item.parameters}
    if item.module == "folds":
        given["folds"] = config.data.folds or FOLDS
    if item.module == "watch" and options.watched:
        given["prefixes"] = list(options.watched)
    return given


def prefect_yaml(configs: list[PipelineConfig], options: Options = Options()) -> str:
    """A prefect.yaml for `prefect deploy --all`.

    Args:
        configs: The configurations.
        options: Pool, time zone and watched folders.
    """
    head = "# Written by `starling deploy --print`; that command without --print also makes pools and automations.\n"
    document = {
        "name": "starling",
        "pull": _pull_steps(options.pool, None),
        "deployments": [entry for config in configs for entry in plan(config, options)],
    }
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def _pull_steps(pool: WorkPool, root: Path | None) -> list[dict[str, Any]] | None:
    """Steps by which a worker finds the code: in the image, or at the same path on the worker's machine."""
    folder = str(root) if pool.kind == "process" and root else IMAGE_FOLDER
    if pool.kind == "process" and root is None:
        return None  # `prefect deploy` then uses its working directory
    return [{"prefect.deployments.steps.set_working_directory": {"directory": folder}}]


def deploy(config: PipelineConfig, options: Options = Options()) -> list[dict[str, Any]]:
    """Register every deployment of a configuration at the Prefect server, and create missing work pools.

    A schedule that was switched off stays off.

    Args:
        config: Becomes the deployments' `config` parameter, which the UI shows as a form.
        options: Pool, time zone and watched folders.

    Returns:
        Name, schedule (cron), time zone and id of each deployment.
    """
    from prefect.client.orchestration import get_client

    root = Path(flows.__file__).resolve().parent.parent
    items = {item.entrypoint: item for item in (*SCHEDULED, _NODE)}
    done: list[dict[str, Any]] = []
    with get_client(sync_client=True) as api:
        for entry in plan(config, options):
            place = entry["work_pool"]
            make_pool(api, options.pool.renamed(place["name"]), place["work_queue_name"])
            item = items[entry["entrypoint"]]
            identity = _register(api, item, entry, _pull_steps(options.pool, root) or [])
            cron = item.cron or None
            done.append(
                {
                    "deployment": f"{item.flow}/{config.name}",
                    "schedule": cron,
                    "timezone": options.timezone,
                    "id": str(identity),
                }
            )
    return done


def _register(api: Any, item: Scheduled, entry: dict[str, Any], pull_steps: list[dict[str, Any]]) -> Any:
    from prefect.utilities.callables import parameter_schema

    loaded = item.load()
    place = entry["work_pool"]
    return api.create_deployment(
        flow_id=api.create_flow_from_name(loaded.name),
        name=entry["name"],
        description=entry["description"],
        tags=entry["tags"],
        entrypoint=entry["entrypoint"],
        pull_steps=pull_steps,
        parameters=entry["parameters"],
        parameter_openapi_schema=parameter_schema(loaded).model_dump_for_openapi(),
        enforce_parameter_schema=True,
        schedules=_schedules(api, f"{loaded.name}/{entry['name']}", entry["schedules"]),
        work_pool_name=place["name"],
        work_queue_name=place["work_queue_name"],
        job_variables=place["job_variables"],
    )


def _schedules(api: Any, name: str, wanted: list[dict[str, str]]) -> list[Any]:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.exceptions import ObjectNotFound

    try:
        before = api.read_deployment_by_name(name).schedules
    except ObjectNotFound:
        before = []
    off = {schedule.slug for schedule in before if not schedule.active}
    return [
        DeploymentScheduleCreate(
            schedule=CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]),
            active=schedule["slug"] not in off,
            slug=schedule["slug"],
        )
        for schedule in wanted
    ]
