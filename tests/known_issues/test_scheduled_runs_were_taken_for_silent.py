"""The state changes of scheduled runs waited for an event that does not exist: finished runs were taken for silent."""

from datetime import UTC, datetime, timedelta

import pytest
from prefect.server.models import events
from prefect.server.schemas.states import State, StateType

from flows.servers.prefect_server import let_scheduled_runs_count


@pytest.mark.parametrize(
    ("kind", "seconds", "follows"),
    [(StateType.SCHEDULED, 1, False), (StateType.PENDING, 1, True), (StateType.RUNNING, 3600, False)],
)
def test_no_event_waits_for_that_of_a_scheduled_state(monkeypatch, kind, seconds, follows):
    monkeypatch.setattr(events, "_timing_is_tight", events._timing_is_tight)  # undone after the test
    let_scheduled_runs_count()
    now = datetime.now(UTC)
    before = State(type=kind, timestamp=now - timedelta(seconds=seconds))
    assert events._timing_is_tight(now, before) is follows
    assert not events._timing_is_tight(now, None)
