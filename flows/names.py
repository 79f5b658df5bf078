"""Names of runs: those of flow runs contain the run's id, which MLflow shows, too, so that no two are equal."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from prefect.context import FlowRunContext
from prefect.runtime import flow_run

if TYPE_CHECKING:
    from tasks.config.pipeline import PipelineConfig

TAG = "starling"
"""Tag of every run: an automation detects its crash."""


def new_run_id(config: "PipelineConfig") -> str:
    """A readable, unique name for a run; retries of a flow run get the same one."""
    return f"{config.name}-{stamp()}"


def stamp() -> str:
    """Time of a run and six digits of its id; of a new one outside of flows."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None:
        return stamp_of(datetime.now(UTC), uuid4())
    # the server makes scheduled runs days before they are due; the times of others change with retries
    due = run.expected_start_time if run.auto_scheduled else run.created
    return stamp_of(due or datetime.now(UTC), run.id)


def stamp_of(due: datetime, identity: UUID) -> str:
    """The end of a run's name: its time in UTC, and six digits of its id."""
    return f"{due.astimezone(UTC):%Y%m%d-%H%M%S}-{identity.hex[-6:]}"


def pipeline_name(what: str, about: str = "{config.corpora}") -> Callable[[], str]:
    """Returns a function that names a flow run after its pipeline's run.

    Args:
        what: First word; may be empty.
        about: What follows the run's id; may contain the flow's parameters.
    """

    def name() -> str:
        given: dict[str, Any] = flow_run.parameters
        run_id = given.get("run_id") or new_run_id(given["config"])
        return f"{what} {run_id}: {about.format(**given)}".strip()

    return name


def stamped_name(what: str) -> Callable[[], str]:
    """Returns a function that names a flow run after what it is about and its time.

    Args:
        what: First words; may contain the flow's parameters.
    """

    def name() -> str:
        return f"{what.format(**flow_run.parameters)} {stamp()}"

    return name
