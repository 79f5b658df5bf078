"""Scheduled runs were called "stoic-curassow" until they started, and then had the time at which Prefect made them.

So runs that were due at 13:50 and at 14:00 were both "watch tiny 20261127-134045".
"""

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.server.models import deployments
from support import tiny_document

from flows import names
from flows.servers.prefect_server import name_scheduled_runs
from tasks.config.pipeline import parse_config

DUE = datetime(2026, 11, 28, 3, 15, tzinfo=timezone(timedelta(hours=1)))


@pytest.mark.parametrize(("tags", "named"), [(["auto-scheduled", "starling"], True), (["auto-scheduled"], False)])
def test_scheduled_run_of_ours_is_named_when_it_is_made(monkeypatch, tags, named):
    run = {"id": uuid4(), "tags": tags, "expected_start_time": DUE}

    async def generate(db, *, session, deployment_id, max_runs):
        return [dict(run) for _ in range(max_runs)]

    class Session:
        async def get(self, kind, identity):
            return {"deployment": SimpleNamespace(name="tiny", flow_id="f"), "flow": SimpleNamespace(name="watch")}[
                kind
            ]

    monkeypatch.setattr(deployments, "_generate_scheduled_flow_runs", generate)
    name_scheduled_runs()
    db = SimpleNamespace(Deployment="deployment", Flow="flow")
    made = asyncio.run(
        deployments._generate_scheduled_flow_runs(db, session=Session(), deployment_id=uuid4(), max_runs=2)
    )
    name = f"watch tiny-20261128-021500-{run['id'].hex[-6:]}"
    assert [entry.get("name") for entry in made] == 2 * [name if named else None]


@pytest.mark.parametrize(("scheduled", "time"), [(True, "20261128-021500"), (False, "20261121-100000")])
def test_started_run_has_the_time_at_which_it_is_due(monkeypatch, scheduled, time):
    made = datetime(2026, 11, 21, 10, tzinfo=UTC)
    run = SimpleNamespace(id=uuid4(), created=made, expected_start_time=DUE, auto_scheduled=scheduled)
    monkeypatch.setattr(names.FlowRunContext, "get", classmethod(lambda cls: SimpleNamespace(flow_run=run)))
    assert names.new_run_id(parse_config(tiny_document())) == f"tiny-{time}-{run.id.hex[-6:]}"
