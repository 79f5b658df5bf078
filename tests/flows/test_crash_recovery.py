"""kill -9 of the worker, of a flow's process and of the server, while it shards and while it trains.

Each time the run ends in the right state, or its retry resumes it; the model is that of an undisturbed run, and no
process is left.
"""

import json
import os
import signal
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import pytest
from support import load_beside, wait_until

from flows.deploy.automations import heartbeat_automation

site_module = load_beside(__file__, "prefect_site.py")
place, slow_document = site_module.place, site_module.slow_document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DOCUMENT = slow_document("slow", epochs=6)
SLOW = {
    "shard": {"stages": ("prepare",), "slow_shard": 1.5},
    "train": {"stages": ("prepare", "shard", "features"), "slow_step": 1.0},
}
"""What is there already, and what makes the stage long enough to be killed in its middle."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with site_module.prefect_site(tmp_path_factory.mktemp("server").resolve()) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory):
    """Data folder of an undisturbed run, and what its stages record."""
    folder = tmp_path_factory.mktemp("undisturbed_run").resolve() / "home"
    return folder, site_module.undisturbed(folder, DOCUMENT)


@contextmanager
def middle(site, folder, stage, made):
    """A deployment's run in the middle of its last stage: its site, and its id."""
    with place(site, folder, deepcopy(DOCUMENT), made=made, **SLOW[stage]) as machine:
        run = machine.run(until=stage)
        wait_until(machine.is_sharding if stage == "shard" else machine.is_training)
        assert machine.record(stage) is None
        yield machine, run


@pytest.fixture(params=["shard", "train"])
def running(request, site, undisturbed_run, tmp_path):
    with middle(site, tmp_path.resolve() / request.param, request.param, undisturbed_run[0]) as machine_and_run:
        yield (
            *machine_and_run,
            partial(check_completed_as_undisturbed, request.param, undisturbed_run[1][request.param]),
        )


def check_completed_as_undisturbed(stage, expected, machine, run):
    """Check that the run completes with the same outputs as an undisturbed run."""
    assert machine.ended(run, 240) == "COMPLETED", machine.log()[-4000:]
    record = machine.record(stage)
    assert record["sets"] == expected["sets"] if stage == "shard" else record["digest"] == expected["digest"]


def kill(pids):
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_killed_flow_crashes_and_its_retry_resumes(site, running):
    machine, run, completes = running
    kill(machine.flow_process())
    # the worker reports the crash, lets another process look for hooks, and reports it again: a retry that came in
    # between would be called crashed
    executed = {"filter": {"event": {"name": ["prefect.worker.executed-flow-run"]}}}
    wait_until(lambda: run in json.dumps(site.get("events/filter", executed)), every_s=1)
    assert machine.state(run) == "CRASHED"
    wait_until(lambda: not machine.trainers())
    before = {path: path.stat().st_mtime_ns for path in machine.shards()}
    machine.command("flow-run", "retry", run)
    wait_until(lambda: machine.state(run) != "CRASHED")
    completes(machine, run)
    assert before == {path: path.stat().st_mtime_ns for path in before}  # what was done is not done again
    if machine.record("train"):
        assert [entry["kind"] for entry in machine.journal() if entry["kind"] in ("start", "resume")] == [
            "start",
            "resume",
        ]
    runs = site.get("flow_runs/filter", {"flow_runs": {"deployment_id": {"any_": [machine.deployment]}}})
    assert [(flow_run["id"], flow_run["run_count"]) for flow_run in runs] == [(run, 2)]


def test_run_of_a_killed_worker_completes_by_itself(running):
    machine, run, completes = running
    machine.worker.process.kill()
    machine.worker.process.wait()
    completes(machine, run)


def test_run_waits_for_a_killed_server(site, running):
    machine, run, completes = running
    site.kill()
    site.start()
    completes(machine, run)


@pytest.mark.parametrize("told", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told-to-end"])
def test_run_that_died_with_its_worker_is_marked_crashed_and_resumed(site, undisturbed_run, tmp_path, told):
    """No process is left to report it: the server's automation notices the missing heartbeats.

    A worker that is told to end kills its runs: Prefect 3.8 gives them no time to say so.
    """
    assert site.get("automations/", heartbeat_automation())["enabled"]
    with middle(site, tmp_path.resolve() / "both", "train", undisturbed_run[0]) as (machine, run):
        about = f"prefect.flow-run.{run}"

        def alive():
            """The first heartbeat arms the automation."""
            answer = site.get("events/filter", {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}}})
            return [event for event in answer["events"] if event["resource"]["prefect.resource.id"] == about]

        wait_until(alive, every_s=1)
        machine.worker.process.send_signal(told)
        machine.worker.process.wait(60)
        if told == signal.SIGKILL:
            kill(machine.flow_process())
        wait_until(lambda: not machine.flow_process() and not machine.trainers())
        wait_until(lambda: machine.state(run) == "CRASHED", every_s=1)
        machine.start_worker()
        machine.command("flow-run", "retry", run)
        wait_until(lambda: machine.state(run) != "CRASHED")
        check_completed_as_undisturbed("train", undisturbed_run[1]["train"], machine, run)
