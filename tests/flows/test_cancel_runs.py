"""Cancelling a run, while it shards and while it trains, on one node and on two, ends every process that it started."""

import json
import os
import subprocess
import sys

import pytest
from support import ROOT, load_beside, wait_until

site_module = load_beside(__file__, "prefect_site.py")
place, slow_document = site_module.place, site_module.slow_document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENDLESS = 100_000
PREFECT_NODES = {"strategy": "adpsgd", "nodes": 2, "launch": {"kind": "prefect"}}
RING = {"strategy": "adpsgd", "nodes": 2}
ENDED_S = 40
"""Ten seconds, and what it takes on a busy machine until the worker hears of it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with site_module.prefect_site(tmp_path_factory.mktemp("server").resolve()) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Data folder with a corpus, its shards and their statistics."""
    folder = tmp_path_factory.mktemp("made").resolve() / "home"
    site_module.undisturbed(folder, slow_document("made"), until="features")
    return folder


def in_the_ui(machine, run):
    machine.site.get(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})


def on_the_command_line(machine, run):
    machine.command("flow-run", "cancel", run)


def cancelled(machine, run, cancel=in_the_ui):
    """Cancel a run, and wait for its processes' end and for its state."""
    cancel(machine, run)
    wait_until(lambda: not machine.flow_process() and not machine.trainers(), ENDED_S)
    wait_until(lambda: machine.state(run) == "CANCELLED")
    wait_until(lambda: machine.site.get("variables/filter", {}) == [])


def test_cancelled_sharding_ends_although_a_piece_takes_minutes(site, made, tmp_path):
    folder = tmp_path.resolve() / "shard"
    with place(site, folder, slow_document("cut"), made=made, stages=["prepare"], slow_shard=300) as machine:
        run = machine.run()
        wait_until(lambda: list(machine.home.glob("locks/shard-*.lock")))
        cancelled(machine, run)
        assert machine.record("shard") is None


@pytest.mark.parametrize(
    ("nodes", "cancel"),
    [({}, in_the_ui), ({}, on_the_command_line), (RING, in_the_ui), (PREFECT_NODES, in_the_ui)],
    ids=["one node", "command line", "two nodes", "two nodes by Prefect"],
)
def test_cancelled_training_ends_with_a_checkpoint_and_free_locks(site, made, tmp_path, nodes, cancel):
    document, folder = slow_document("cut", ENDLESS, **nodes), tmp_path.resolve() / "train"
    stages = ("prepare", "shard", "features")
    with place(site, folder, document, made=made, stages=stages, slow_step=0.2) as machine:
        run = machine.run()
        wait_until(machine.is_training, 300)
        cancelled(machine, run, cancel)
        assert machine.record("train") is None
        assert machine.checkpoints()
        node_runs = site.get("flow_runs/filter", {"flow_runs": {"tags": {"all_": ["starling-node"]}}})
        assert len(node_runs) == (2 if nodes is PREFECT_NODES else 0)
        wait_until(lambda: all(machine.state(node["id"]) in site_module.ENDED for node in node_runs))


def test_run_started_in_a_terminal_ends_when_cancelled_in_the_ui(site, made, tmp_path):
    """No worker watches it, so the run has to notice the cancellation."""
    document, stages = slow_document("typed", ENDLESS), ("prepare", "shard", "features")
    with place(site, tmp_path.resolve() / "typed", document, made=made, stages=stages, slow_step=0.2) as machine:
        path = machine.home / "typed.json"
        path.write_text(json.dumps(machine.document))
        command = [sys.executable, "-m", "flows.cli.app", "run", str(path), "--until", "train"]
        with (machine.home / "command.log").open("w") as log:
            typed = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **machine.env()}, stdout=log, stderr=log)
        try:
            wait_until(machine.is_training, 300)
            running = {"state": {"type": {"any_": ["RUNNING"]}}, "parent_task_run_id": {"is_null_": True}}
            (run,) = [r["id"] for r in site.get("flow_runs/filter", {"flow_runs": running}) if not r["deployment_id"]]
            in_the_ui(machine, run)
            assert typed.wait(ENDED_S) != 0
            wait_until(lambda: not machine.trainers())
            wait_until(lambda: machine.state(run) == "CANCELLED")
            assert machine.checkpoints()
            assert "Traceback" not in (machine.home / "command.log").read_text()
        finally:
            typed.kill()
            typed.wait()
