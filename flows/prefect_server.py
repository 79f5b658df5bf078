"""Prefect's server with one thing added: after a restart it waits before it calls anybody dead.

Prefect keeps the windows in which a run's next heartbeat is due in its database, and judges them two seconds after it
has started. Whatever ran on while the server was away would be called crashed before it could say a word. So windows
that ended meanwhile are opened again, for as long as they were, before the server starts; runs that have really died
are found when that has passed. Start it as `uvicorn --factory flows.prefect_server:create_app`.
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

    app = prefect_app()
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(scope: Any) -> AsyncIterator[Any]:
        await reopen_windows()
        async with inner(scope) as state:
            yield state

    app.router.lifespan_context = lifespan
    return app


async def reopen_windows() -> int:
    """Let every window of a proactive trigger begin anew, and forget no run whose window has ended meanwhile.

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
