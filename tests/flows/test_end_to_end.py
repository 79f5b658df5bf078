"""The pipeline against a real Prefect server and a real MLflow server, through the command line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from support import (
    ROOT,
    end_processes,
    environment,
    get_json,
    give_mlflow,
    processes_naming,
    starling,
    tiny_document,
    wait_until,
    write_config,
)

from flows.servers.services import note_path, running_services, start_mlflow, start_prefect
from tasks.config.pipeline import parse_config
from tasks.stages.base import stages_of

ALWAYS = [*stages_of(parse_config(tiny_document()))]
"""Stages that need no section of their own in the configuration."""
RUN_FIELDS = {"run_id", "stages", "utterances", "sets", "model_uri", "model_aliases", "report"}
SET_FIELDS = {"wer", "wer_low", "wer_high", "cer", "sub", "ins", "del", "words", "utterances"}


def trainers(home):
    """Training processes below a data folder."""
    return [
        p
        for p in processes_naming(str(home))
        if b"training.launch.supervisor" in Path(f"/proc/{p}/cmdline").read_bytes()
    ]


def flow_runs(api, **states):
    runs = get_json(f"{api}/flow_runs/filter", {"sort": "START_TIME_ASC", **states})
    return [(run["name"], run["state_type"]) for run in runs]


def endless():
    """A pipeline whose training takes longer than any test."""
    document = tiny_document()
    document["train"] |= {"epochs": 100_000}
    return document


class Servers:
    """Both servers on a separate data folder, and the first run against them."""

    def __init__(self, home):
        self.home = home
        self.config = write_config(home / "tiny.yaml", tiny_document())
        give_mlflow(home)
        self.services = [start_prefect(), start_mlflow()]
        for service in self.services:
            service.wait()
        self.prefect, self.mlflow = (service.url for service in self.services)
        self.api = f"{self.prefect}/api"
        note_path().write_text(json.dumps({"prefect": self.prefect, "mlflow": self.mlflow}))
        self.first = self.run()

    def run(self, *options):
        return starling("run", self.config, "--json", *options, home=self.home)

    def stop(self):
        for service in self.services:
            service.stop()
        end_processes(processes_naming(str(self.home)))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    home = tmp_path_factory.mktemp("servers").resolve()
    with environment(STARLING_HOME=home, MLFLOW_TRACKING_URI=None, PREFECT_API_URL=None):
        assert running_services() == {}
        started = Servers(home)
        try:
            yield started
        finally:
            started.stop()
    assert processes_naming(str(home)) == []


def test_run_prints_only_one_json_object_on_standard_output(servers):
    lines = servers.first.stdout.splitlines()
    assert len(lines) == 1
    summary = json.loads(lines[0])
    assert summary.keys() >= RUN_FIELDS
    assert [stage["name"] for stage in summary["stages"]] == ALWAYS
    assert all(stage["cached"] is False and stage["seconds"] >= 0 and stage["counts"] for stage in summary["stages"])
    assert summary["utterances"] == {"read": 40, "written": 40, "quarantined": 0}
    assert set(summary["sets"]) == {"test"}
    assert summary["sets"]["test"].keys() >= SET_FIELDS
    assert summary["sets"]["test"]["utterances"] == 12
    assert summary["model_uri"] == "models:/tiny/1"
    assert summary["model_aliases"] == ["challenger", "champion"]
    assert "<html" in Path(summary["report"]).read_text()
    assert "starling transcribe --model models:/tiny@champion" in servers.first.stderr
    assert "Traceback" not in servers.first.stderr


def test_prefect_has_the_flows_the_tasks_and_their_artifacts(servers):
    assert servers.prefect in servers.first.stderr
    runs = flow_runs(servers.api)[:4]
    run_id = json.loads(servers.first.stdout)["run_id"]
    assert runs[0] == (f"{run_id}: synthetic, conformer", "COMPLETED")
    about = {"ingest": "synthetic", "train": "synthetic, conformer", "evaluate": "synthetic"}
    assert {name for name, _ in runs[1:]} == {f"{part} {run_id}: {what}" for part, what in about.items()}
    assert {state for _, state in runs} == {"COMPLETED"}
    ran = [t for t in get_json(f"{servers.api}/task_runs/filter", {}) if t["name"].rpartition("-")[0] in ALWAYS]
    assert {t["name"].rpartition("-")[0] for t in ran} == set(ALWAYS)
    assert {t["state_type"] for t in ran} == {"COMPLETED"}
    artifacts = {a["key"]: a for a in get_json(f"{servers.api}/artifacts/filter", {})}
    assert {"tiny-prepare", "tiny-score", "tiny-register", "tiny-curves", "tiny-report"} <= set(artifacts)
    assert {a["type"] for a in artifacts.values()} >= {"table", "markdown", "progress"}
    assert "models:/tiny/1" in artifacts["tiny-register"]["data"]
    assert '"set": "test"' in artifacts["tiny-score"]["data"]


def test_prefect_keeps_no_pickle(servers):
    assert not [p for p in (servers.home / "prefect").rglob("*") if p.suffix in (".pkl", ".pickle")]


def test_mlflow_has_run_and_model_naming_the_flow_run(servers):
    client = mlflow.MlflowClient(tracking_uri=servers.mlflow, registry_uri=servers.mlflow)
    version = client.get_model_version_by_alias("tiny", "champion")
    run = client.get_run(version.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["prefect.flow_run"].startswith(servers.prefect)
    assert {"training/loss", "training/lr", "test.wer"} <= set(run.data.metrics)
    with environment(MLFLOW_TRACKING_URI=servers.mlflow):
        result = starling(
            "transcribe",
            next((servers.home / "corpora").rglob("*.flac")),
            "--model",
            "models:/tiny@champion",
            "--json",
            home=servers.home,
        )
    answer = json.loads(result.stdout)
    assert answer["files"][0]["error"] == ""


@pytest.mark.slow
def test_rerun_is_cached_and_says_so(servers):
    first = json.loads(servers.first.stdout)
    again = json.loads(servers.run().stdout)
    assert [stage["cached"] for stage in again["stages"]] == [True] * len(ALWAYS)
    for field in ("sets", "utterances", "model_uri", "model_aliases", "report"):
        assert again[field] == first[field]
    assert again["run_id"] != first["run_id"]
    body = {"task_runs": {"state": {"name": {"any_": ["Cached"]}}}}
    cached = get_json(f"{servers.api}/task_runs/filter", body)
    assert {t["name"].rpartition("-")[0] for t in cached} == set(ALWAYS)


@pytest.mark.slow
def test_killing_a_run_ends_its_training(servers):
    config = write_config(servers.home / "endless.yaml", endless())
    command = [sys.executable, "-m", "flows.cli.app", "run", str(config)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    with (servers.home / "killed.log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            trainer = wait_until(lambda: trainers(servers.home))
            journals = lambda: [p for p in servers.home.glob("work/*/journal.jsonl") if p.stat().st_size > 5000]  # noqa: E731
            wait_until(journals)
            assert trainers(servers.home) == trainer
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
    wait_until(lambda: not trainers(servers.home))


@pytest.mark.slow
def test_error_is_one_message_without_traceback(servers):
    done = starling("run", servers.config, "--set", "score.sets=[nosuch]", "--json", home=servers.home, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "score.sets names 'nosuch', but the data has only test, train, valid" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_up_serves_deployments_until_it_is_interrupted(tmp_path):
    from flows.servers.services import free_port

    home = tmp_path / "home"
    home.mkdir()
    config = write_config(tmp_path / "tiny.yaml", tiny_document())
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "flows.cli.app", "up", "--config", str(config), "--json"]
    command += ["--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1])]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    env |= {"STARLING_HOME": str(home), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "up.log").open("w") as log:
        up = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            announced = json.loads(up.stdout.readline())
            assert announced["urls"] == {
                "prefect": f"http://127.0.0.1:{ports[0]}",
                "mlflow": f"http://127.0.0.1:{ports[1]}",
            }
            schedules = {entry["deployment"]: entry["schedule"] for entry in announced["deployments"]}
            assert schedules["pipeline/tiny"].split()[1] == "2"
            assert schedules["evaluate/tiny"].split()[1] == "*"
            api = announced["urls"]["prefect"] + "/api"
            use_deployments(api, home)
            up.send_signal(signal.SIGINT)
            assert up.wait(90) == 0
        finally:
            up.kill()
            up.wait()
            up.stdout.close()
    left = processes_naming(str(home))
    end_processes(left)
    assert left == []
    assert not (home / "services.json").exists()


def use_deployments(api, home):
    """Let the worker run a deployment to its end, cancel a second run, and leave a third one training."""
    deployment = get_json(f"{api}/deployments/name/pipeline/tiny")

    def create(parameters):
        return get_json(f"{api}/deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})["id"]

    def state(run):
        return get_json(f"{api}/flow_runs/{run}")["state_type"]

    whole = create({})
    wait_until(lambda: state(whole) in ("COMPLETED", "FAILED", "CRASHED"), every_s=1)
    assert state(whole) == "COMPLETED"
    mine = json.loads(starling("run", home / ".." / "tiny.yaml", "--json", home=home).stdout)
    assert [stage["cached"] for stage in mine["stages"]] == [True] * len(ALWAYS)
    assert mine["model_aliases"] == ["challenger", "champion"]

    cancelled = create({"config": endless()})
    wait_until(lambda: trainers(home), every_s=1)
    get_json(f"{api}/flow_runs/{cancelled}/set_state", {"state": {"type": "CANCELLING"}})
    wait_until(lambda: not trainers(home), every_s=1)
    wait_until(lambda: state(cancelled) == "CANCELLED", every_s=1)

    create({"config": endless()})
    wait_until(lambda: trainers(home), every_s=1)
