"""Under SQLAlchemy 2.1 Prefect's scheduler could not insert a single run; it said so in the server's log only."""

from uuid import uuid4

import sqlalchemy as sa
from prefect.server.database import provide_database_interface

from flows.servers.prefect_server import let_schedules_insert


def test_scheduled_runs_are_inserted_with_their_state():
    let_schedules_insert()
    runs = provide_database_interface().FlowRun
    engine = sa.create_engine("sqlite://")
    runs.__table__.create(engine)
    with sa.orm.Session(engine) as session:
        rows = [{"id": uuid4(), "flow_id": uuid4(), "name": name, "state": {"type": "SCHEDULED"}} for name in "ab"]
        session.execute(sa.insert(runs), rows)  # as prefect.server.models.deployments does
        assert set(session.execute(sa.select(runs.name)).scalars()) == {"a", "b"}
