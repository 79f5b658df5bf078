"""Prefect's server with two fixes: for heartbeats after a restart, and for schedules with SQLAlchemy 2.1.

Prefect stores the window in which a run's next heartbeat is due in its database, and evaluates it two seconds after the
server starts. Runs that continued while the server was down would be marked as crashed before their next heartbeat. So
windows that expired in the meantime are reopened, with their full length, before the server starts; runs that have
really died are detected after that.

Prefect inserts scheduled runs with their state, a property of its models that SQLAlchemy 2.1 takes for a read-only
column. Without the fix no schedule ever runs.

Start it as `uvicorn --factory flows.servers.prefect_server:create_app`.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

_log = logging.getLogger(__name__)


def create_app() -> Any:
    """The ASGI application of a Prefect server."""
    from prefect.server.api.server import create_app as prefect_app

    let_schedules_insert()
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
