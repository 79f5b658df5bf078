"""Prefect's server with four fixes: for heartbeats after a restart, and for schedules.

Prefect stores the window in which a run's next heartbeat is due in its database, and evaluates it two seconds after the
server starts. Runs that continued while the server was down would be marked as crashed before their next heartbeat. So
windows that expired in the meantime are reopened, with their full length, before the server starts; runs that have
really died are detected after that.

Prefect inserts scheduled runs with their state, a property of its models that SQLAlchemy 2.1 takes for a read-only
column. Without the fix no schedule ever runs.

Automations see a run's state changes in their order. Prefect inserts scheduled runs without an event of their first
state, and would hold back all that follow for 15 minutes: the end of a short run came after its heartbeat had been
missed, and its failure was notified late.

Prefect gives scheduled runs names of animals until they start; ours say what they are of, and when they are due.

Start it as `uvicorn --factory flows.servers.prefect_server:create_app`.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from flows.names import TAG, stamp_of

_log = logging.getLogger(__name__)


def create_app() -> Any:
    """The ASGI application of a Prefect server."""
    from prefect.server.api.server import create_app as prefect_app

    let_schedules_insert()
    let_scheduled_runs_count()
    name_scheduled_runs()
    app = prefect_app()
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(scope: Any) -> AsyncIterator[Any]:
        await reopen_windows()
        async with inner(scope) as state:
            yield state

    app.router.lifespan_context = lifespan
    return app


def let_schedules_insert() -> None:
    """Make SQLAlchemy 2.1 ignore the state when it inserts runs, as 2.0 did; Prefect writes it to another table."""
    import sqlalchemy as sa
    from prefect.server.database import provide_database_interface

    state: Any = sa.inspect(provide_database_interface().FlowRun).all_orm_descriptors["state"]
    if getattr(state, "bulk_dml_setter", "there is no such thing in 2.0") is None:
        state.bulk_dml_setter = lambda cls, mapping, value: None


def let_scheduled_runs_count() -> None:
    """Let no event wait for that of a Scheduled state, which may not exist."""
    from prefect.server.models import events
    from prefect.server.schemas.states import StateType

    # as Any: a private function of the pinned version
    module: Any = events
    close_together = module._timing_is_tight

    def follows(occurred: datetime, initial_state: Any) -> bool:
        scheduled = initial_state is not None and initial_state.type == StateType.SCHEDULED
        return not scheduled and bool(close_together(occurred, initial_state))

    module._timing_is_tight = follows


def name_scheduled_runs() -> None:
    """Name the scheduled runs of our deployments after flow, configuration and time, until they start."""
    from prefect.server.models import deployments

    # as Any: a private function of the pinned version
    module: Any = deployments
    generate = module._generate_scheduled_flow_runs

    async def generate_named(db: Any, session: Any, deployment_id: UUID, **given: Any) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = await generate(db, session=session, deployment_id=deployment_id, **given)
        if any(TAG in run["tags"] for run in runs):
            deployment = await session.get(db.Deployment, deployment_id)
            flow = await session.get(db.Flow, deployment.flow_id)
            for run in runs:
                run["name"] = f"{flow.name} {deployment.name}-{stamp_of(run['expected_start_time'], run['id'])}"
        return runs

    module._generate_scheduled_flow_runs = generate_named


async def reopen_windows() -> int:
    """Reopen the expired windows of proactive triggers, with their full length from now on.

    Returns:
        Number of reopened windows.
    """
    import sqlalchemy as sa
    from prefect.server.database import provide_database_interface

    db = provide_database_interface()
    now = datetime.now(UTC)
    try:
        async with db.session_context(begin_transaction=True) as session:
            rows = (
                await session.execute(sa.select(db.AutomationBucket).where(db.AutomationBucket.end < now))
            ).scalars()
            late = list(rows)
            for bucket in late:
                bucket.end = now + (bucket.end - bucket.start)
    except sa.exc.DBAPIError:  # a new database has no tables yet; the server creates them
        return 0
    if late:
        _log.warning("%d heartbeat windows expired while the server was down; they were reopened", len(late))
    return len(late)
