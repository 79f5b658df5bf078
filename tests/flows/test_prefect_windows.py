"""The time windows of automations when the Prefect server starts; test_automations.py has a real server."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa
from prefect.server.database import provide_database_interface
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, temporary_settings

from flows.servers.prefect_server import reopen_windows


@pytest.fixture
def database(tmp_path):
    with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{tmp_path}/p.db"}):
        yield provide_database_interface()


def bucket(db, number, begin_s, end_s):
    now = datetime.now(UTC)
    begin, end = (now + timedelta(seconds=seconds) for seconds in (begin_s, end_s))
    return db.AutomationBucket(
        automation_id=uuid4(),
        trigger_id=uuid4(),
        bucketing_key=[str(number)],
        last_operation="",
        start=begin,
        end=end,
        count=0,
        last_event=None,
    )


def test_windows_that_ended_during_downtime_restart(database):
    async def ends():
        async with database.session_context() as session:
            rows = (await session.execute(sa.select(database.AutomationBucket))).scalars().all()
            return {row.bucketing_key[0]: row.end for row in rows}

    async def work():
        engine = await database.engine()
        async with engine.begin() as connection:
            await connection.run_sync(database.AutomationBucket.__table__.create)
        async with database.session_context() as session:
            # their automations do not exist
            await session.execute(sa.text("PRAGMA foreign_keys = OFF"))
            session.add_all([bucket(database, 1, -500, -410), bucket(database, 2, -30, 60)])
            await session.commit()
        before = await ends()
        return before, await reopen_windows(), await ends(), await reopen_windows()

    began = datetime.now(UTC)
    before, count, after, again = asyncio.run(work())
    assert (count, again) == (1, 0)
    assert after["2"] == before["2"]
    assert 90 <= (after["1"] - began).total_seconds() < 600
