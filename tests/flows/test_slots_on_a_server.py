"""Locks on a real Prefect server: leases that outlive it, double starts, and a schedule that is too fast."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from support import ROOT, load_beside, wait_until

from tasks.locking import leases
from tasks.locking.leases import LeaseTable, LockLease, impatient_client
from tasks.locking.lock_owner import LockOwner
from training.coordinator.journal import read_journal

site_module = load_beside(__file__, "prefect_site.py")
place, slow_document = site_module.place, site_module.slow_document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with site_module.prefect_site(tmp_path_factory.mktemp("server").resolve()) as started:
        yield started


@pytest.fixture
def api(site):
    with temporary_settings({PREFECT_API_URL: site.api}):
        yield site.api


def elsewhere(run):
    return replace(LockOwner.here(run), place="far/boot/ns")


def test_real_server_fulfils_the_lease_contract(api, monkeypatch):
    first, second = elsewhere("first"), elsewhere("second")
    with impatient_client() as client:
        table = LeaseTable(client)
        lease = table.take("lock-contract", first)
        assert isinstance(lease, str)
        assert table.take("lock-contract", first) == lease
        assert table.take("lock-contract", second) == first
        assert table.renew(lease, first)
        monkeypatch.setattr(leases, "LEASE_S", -5.0)  # all leases are stale
        taken = table.take("lock-contract", second)
        assert isinstance(taken, str)
        monkeypatch.undo()
        assert not table.renew(lease, first)
        table.drop(lease)
        assert table.take("lock-contract", first) == second
        table.drop(taken)
        assert isinstance(table.take("lock-contract", first), str)


def test_lease_survives_a_killed_server(site, api, caplog):
    caplog.set_level("INFO")
    me = elsewhere("mine")
    with impatient_client() as client:
        lease = LockLease("lock-outage", LeaseTable(client).take("lock-outage", me), me, beat_s=0.5)
    site.kill()
    wait_until(lambda: "cannot be renewed" in caplog.text)
    site.start()
    wait_until(lambda: "answers again" in caplog.text)
    with impatient_client() as client:
        assert LeaseTable(client).take("lock-outage", elsewhere("other")) == me
        lease.give_back()
        assert isinstance(LeaseTable(client).take("lock-outage", elsewhere("other")), str)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Data folder with a corpus, its shards and their statistics."""
    folder = tmp_path_factory.mktemp("made").resolve() / "home"
    site_module.undisturbed(folder, slow_document("made"), until="features")
    return folder


def test_one_of_several_concurrent_runs_trains_and_all_get_the_model(site, made, tmp_path):
    """Two runs of one deployment, and a run from the command line beside them."""
    document, stages = slow_document("twice", 10), ("prepare", "shard", "features")
    with place(site, tmp_path.resolve() / "twice", document, made=made, stages=stages, slow_step=1.0) as machine:
        runs = [machine.run(), machine.run()]
        path = machine.home / "twice.json"
        path.write_text(json.dumps(machine.document))
        command = [sys.executable, "-m", "flows.cli.app", "run", str(path), "--until", "train", "--json"]
        env = {**os.environ, **machine.env()}
        with (machine.home / "command.log").open("w") as log:
            beside = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            assert [machine.ended(run, 300) for run in runs] == ["COMPLETED", "COMPLETED"]
            assert beside.wait(300) == 0, (machine.home / "command.log").read_text()
        finally:
            beside.kill()
            beside.wait()
        journals = list(machine.home.glob("objects/train/*/journal.jsonl"))
        assert len(journals) == 1
        assert [entry["kind"] for entry in read_journal(journals[0])].count("start") == 1
        told = [line["message"] for line in site.get("logs/filter", {})]  # of the stages' flow runs, within the runs
        assert any("waiting for run twice-" in message for message in told)
        assert not [v for v in site.get("variables/filter", {}) if "twice" in v["value"]["run"]]


def test_runs_of_a_fast_schedule_neither_overlap_nor_accumulate(site, made, tmp_path):
    """A schedule of every 20 s and a run of a minute represent an hourly schedule and a run of half a day."""
    often = {"made": made, "stages": ("prepare",), "slow_shard": 4.0}
    with place(site, tmp_path.resolve() / "often", slow_document("often"), **often) as machine:
        schedule = {"schedule": {"interval": 20.0}, "active": True, "parameters": {"until": "shard"}}
        site.get(f"deployments/{machine.deployment}/schedules", [schedule])

        def named(*names):
            chosen = {"deployment_id": {"any_": [machine.deployment]}}
            flow_runs = site.get("flow_runs/filter", {"flow_runs": chosen, "sort": "EXPECTED_START_TIME_ASC"})
            return [run for run in flow_runs if not names or run["state_name"] in names]

        wait_until(lambda: len(named("Skipped")) >= 2 and len(named("Completed")) >= 2, 400, 2)
        site.get(f"deployments/{machine.deployment}/pause_deployment", {})
        late = named("Late")
        wait_until(lambda: not named("Late", "Pending", "Submitting", "InfrastructurePending", "Running"), every_s=1)
        ran = sorted((moment(run["start_time"]), moment(run["end_time"])) for run in named("Completed"))
        for (_, end), (start, _) in pairwise(ran):
            assert start >= end - timedelta(seconds=2)  # it is over a moment before the server hears of it
        assert len(late) <= 4
        assert not named("Failed", "Crashed", "Cancelled")


def moment(text):
    return datetime.fromisoformat(text)
