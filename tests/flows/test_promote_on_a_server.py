"""`starling promote` and `starling rollback` with real servers of Prefect and MLflow: runs, links, events, locks."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from support import ROOT, copy_database, copy_finished, environment, finished, load_beside, starling, wait_until

from flows.servers.services import start_mlflow
from tasks.locking.leases import LeaseTable, impatient_client
from tasks.locking.lock_owner import LockOwner
from tasks.tracking.registry import CHAMPION, lock_name
from tasks.tracking.runs import client

site_module = load_beside(__file__, "prefect_site.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with site_module.prefect_site(tmp_path_factory.mktemp("server").resolve()) as started:
        yield started


@pytest.fixture
def place(site, tmp_path, monkeypatch):
    """A data folder with a registered version and an MLflow server; the environment that names both servers."""
    home = copy_finished(tmp_path / "home")
    copy_database(finished()[0] / "mlflow" / "mlflow.db", home / "mlflow" / "mlflow.db")
    with environment(STARLING_HOME=home):
        server = start_mlflow().wait()
    monkeypatch.setenv("STARLING_HOME", str(home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    try:
        yield {"home": home, "PREFECT_API_URL": site.api, "MLFLOW_TRACKING_URI": server.url}
    finally:
        server.stop()


def run_named(site, name):
    """The latest run whose name starts so, and the Markdown that it left."""
    wanted = {"flow_runs": {"name": {"like_": f"{name} "}}}
    (run,) = site.get("flow_runs/filter", wanted | {"sort": "START_TIME_DESC", "limit": 1})
    texts = [
        artifact["data"] for artifact in site.get("artifacts/filter", wanted) if artifact["flow_run_id"] == run["id"]
    ]
    return run, texts


def events(site, name, count=1):
    """Events of that name, the newest first, as soon as the server has so many."""
    wanted = {"filter": {"event": {"name": [name]}, "order": "DESC"}}

    def enough():
        events = site.get("events/filter", wanted)["events"]
        return events if len(events) >= count else None

    return wait_until(enough)


def another_version(api):
    """A second version of the same model; its number."""
    first = api.get_model_version("tiny", "1")
    model = first.source.removeprefix("models:/")
    made = api.create_model_version("tiny", source=first.source, run_id=first.run_id, model_id=model)
    return str(made.version)


def test_promotion_and_rollback_have_runs_events_and_links(site, place):
    api = client()
    api.delete_registered_model_alias("tiny", CHAMPION)
    outcome = json.loads(starling("promote", "tiny", "--json", **place).stdout)
    assert (outcome["promoted"], outcome["reason"]) == (True, "became champion: there was none before")
    run, (text,) = run_named(site, "promote tiny")
    assert run["state_type"] == "COMPLETED"
    assert "tiny version 1: promoted" in text
    assert f"[MLflow run]({place['MLFLOW_TRACKING_URI']}/#/experiments/" in text
    assert f"[model version]({place['MLFLOW_TRACKING_URI']}/#/models/tiny/versions/1?" in text
    version = api.get_model_version("tiny", "1")
    assert run["id"] in version.tags["promotion.flow_run"]
    (event,) = events(site, "starling.promoted")
    assert event["resource"]["prefect.resource.id"] == "starling.model.tiny"
    assert event["payload"] == {"version": "1", "from": "", "reason": "became champion: there was none before"}

    number = another_version(api)
    forced = ["--version", number, "--force", "--reason", "it is smaller"]
    assert "champion" in starling("promote", "tiny", *forced, **place).stdout
    assert events(site, "starling.promoted", 2)[0]["payload"]["version"] == number
    moved = json.loads(starling("rollback", "tiny", "--reason", "it mishears", "--json", **place).stdout)
    assert (moved["champion"], moved["replaced"]) == ("1", number)
    run, (text,) = run_named(site, "rollback tiny")
    assert run["state_type"] == "COMPLETED"
    assert "version 1 is champion again" in text
    (event,) = events(site, "starling.rolled-back")
    assert event["payload"] == {"version": "1", "from": number, "reason": "it mishears"}
    failed = starling("rollback", "tiny", check=False, **place)
    assert failed.returncode == 1
    assert "replaced no champion" in failed.stderr
    assert run_named(site, "rollback tiny")[0]["state_type"] == "FAILED"


def test_rollback_waits_for_a_promotion_on_another_machine(site, place):
    api = client()
    number = another_version(api)
    starling("promote", "tiny", "--version", number, "--force", "--reason", "a test", **place)
    elsewhere = replace(LockOwner.here("promote tiny"), place="far/boot/ns")
    name = lock_name("registry", "tiny")
    with temporary_settings({PREFECT_API_URL: site.api}), impatient_client() as leases:
        lease = LeaseTable(leases).take(name, elsewhere)
        assert isinstance(lease, str)
        env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        env["PREFECT_API_URL"] = site.api
        command = [sys.executable, "-m", "flows.cli.app", "rollback", "tiny"]
        rollback = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            wait_until(lambda: any("waiting for" in line["message"] for line in site.get("logs/filter", {})))
            assert rollback.poll() is None
            assert str(api.get_model_version_by_alias("tiny", CHAMPION).version) == number
            LeaseTable(leases).drop(lease)
            assert rollback.wait(60) == 0
        finally:
            rollback.kill()
            rollback.communicate()
    assert str(api.get_model_version_by_alias("tiny", CHAMPION).version) == "1"
