"""Prefect's server with two things added: after a restart it waits before it calls anybody dead, and schedules work.

Prefect keeps the windows in which a run's next heartbeat is due in its database, and judges them two seconds after it
has started. Runs that went on while the server was away would be called crashed before their next heartbeat. So windows
that ended meanwhile are opened again, for as long as they were, before the server starts; runs that have really died
are found when that has passed.

Prefect inserts the runs of schedules with their states, for which its models have a property that SQLAlchemy 2.1 takes
for a column without a way to write it, so that no schedule would ever run.

Start it as `uvicorn --factory flows.prefect_server:create_app`.
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
    """Let SQLAlchemy 2.1 insert runs with a state, as 2.0 did: the state itself is another table's, written apart."""
    import sqlalchemy as sa
    from prefect.server.database import provide_database_interface

    state: Any = sa.inspect(provide_database_interface().FlowRun).all_orm_descriptors["state"]
    if getattr(state, "bulk_dml_setter", "there is no such thing in 2.0") is None:
        state.bulk_dml_setter = lambda cls, mapping, value: None


async def reopen_windows() -> int:
    """Restart every window of a proactive trigger, and forget no run whose window has ended meanwhile.

    Returns:
        How many windows there were.
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
    except sa.exc.DBAPIError:  # a new database has no tables before the server makes them
        return 0
    if late:
        _log.warning("%d windows ended while the server was away; they begin again", len(late))
    return len(late)
