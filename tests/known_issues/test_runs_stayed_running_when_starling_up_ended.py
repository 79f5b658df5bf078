"""Ctrl-C on `starling up` ended workers, which killed their flows at once: their runs stayed Running forever."""

import os
import signal
import sqlite3
import subprocess
import sys
from uuid import uuid4

import pytest
from support import ROOT, end_processes, get_json, processes_naming, tiny_document, wait_until, write_config

from flows.servers import local_runs
from flows.servers.services import free_port, spawn
from training.coordinator.journal import read_journal

pytestmark = pytest.mark.real_interpreter

WORKER = """
import os, signal, subprocess, sys
flow = '''
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(open(sys.argv[1], "a").write("flow ended "))
    if sys.argv[2] == "polite" else None)
print("up", flush=True)
while True:
    time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", flow, *sys.argv[1:3]],
    env={**os.environ, "PREFECT__FLOW_RUN_ID": sys.argv[3]}, stdout=subprocess.PIPE)
child.stdout.readline()
print("up", flush=True)
child.wait()
open(sys.argv[1], "a").write("worker saw it")
"""


@pytest.fixture
def server_requests(monkeypatch):
    """Records requests to the server instead of sending them."""
    told = []
    monkeypatch.setattr(local_runs, "_cancelling", lambda runs: told.append(("cancelling", runs)))
    monkeypatch.setattr(local_runs, "_cancelled", lambda runs: told.append(("cancelled", runs)))
    return told


@pytest.mark.parametrize(
    ("kind", "patience_s", "written"), [("polite", 240, "flow ended worker saw it"), ("deaf", 0.1, "worker saw it")]
)
def test_flows_end_before_their_worker_is_stopped(home, tmp_path, server_requests, kind, patience_s, written):
    run, notes = uuid4(), tmp_path / "notes"
    worker = spawn("worker", [sys.executable, "-c", WORKER, str(notes), kind, str(run)], "", "")
    try:
        wait_until(lambda: "up" in worker.log.read_text())
        local_runs.end_runs([worker], patience_s)
        assert worker.process.wait(240) == 0
        assert notes.read_text() == written
        assert server_requests == [("cancelling", [run]), ("cancelled", [run])]
    finally:
        end_processes(processes_naming(str(notes)))


def training(home):
    journal = next(home.glob("work/train-*/journal.jsonl"), None)
    return journal and sum(entry["kind"] == "step" for entry in read_journal(journal)) > 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ctrl_c_cancels_the_runs_of_the_workers(tmp_path):
    home = (tmp_path / "home").resolve()
    home.mkdir()
    document = tiny_document("upped")
    document["train"] |= {"epochs": 100_000}
    config, port = write_config(home / "config.json", document), free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    words = [*("up", "--folder", str(home), "--config", str(config)), "--prefect-port", str(port)]
    command = [sys.executable, "-m", "flows.cli.app", *words, "--mlflow-port", str(free_port())]
    with (home / "output.txt").open("wb") as out:
        up = subprocess.Popen(
            command, cwd=ROOT, env=env | {"OMP_NUM_THREADS": "1"}, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_until(lambda: (home / "services.json").exists() or up.poll() is not None)
        api = f"http://127.0.0.1:{port}/api"
        deployment = get_json(f"{api}/deployments/name/pipeline/upped")["id"]
        get_json(f"{api}/deployments/{deployment}/create_flow_run", {})
        wait_until(lambda: training(home), 500)
        os.killpg(up.pid, signal.SIGINT)
        assert up.wait(240) == 0
        assert not processes_naming(str(home))
    finally:
        up.kill()
        up.wait()
        end_processes(processes_naming(str(home)))
    with sqlite3.connect(home / "prefect" / "prefect.db") as connection:
        states = {state for (state,) in connection.execute("select state_type from flow_run")}
    assert "CANCELLED" in states
    assert states <= {"CANCELLED", "COMPLETED", "SCHEDULED"}
