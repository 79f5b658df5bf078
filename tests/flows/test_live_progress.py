"""Progress of a running training on the pages of Prefect and MLflow, from real servers."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import mlflow
import pytest
from support import ROOT, copy_finished, environment, tiny_document, wait_until, write_config

from flows.servers.services import start_mlflow, start_prefect


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_running_training_is_visible_in_prefect_and_mlflow(tmp_path):
    """Progress with speed and a link in Prefect; in MLflow curves of the learner and the machine's figures."""
    home = copy_finished(tmp_path / "home")
    document = tiny_document()
    document["train"] |= {"epochs": 4000, "batch_seconds": 6, "log_steps": 5}
    config = write_config(tmp_path / "c.yaml", document)
    with environment(STARLING_HOME=home, MLFLOW_TRACKING_URI=None):
        servers = [start_prefect(), start_mlflow()]
    prefect, tracking = servers
    runner = None
    try:
        for server in servers:
            server.wait(180)
        env = {**os.environ, "STARLING_HOME": str(home), "MLFLOW_TRACKING_URI": tracking.url}
        env |= {"PREFECT_API_URL": f"{prefect.url}/api"}
        with (tmp_path / "run.log").open("wb") as log:
            command = [sys.executable, "-m", "flows.cli.app", "run", str(config)]
            runner = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

        def live():
            assert runner.poll() is None, (tmp_path / "run.log").read_text()[-3000:]
            artifacts = post(
                f"{prefect.url}/api/artifacts/filter", {"artifacts": {"key": {"any_": ["tiny-train-progress"]}}}
            )
            # the first line of the journal has no speed
            said = ("MLflow run", "× real time")
            return [
                artifact
                for artifact in artifacts
                if 0 < artifact["data"] < 100 and all(w in (artifact["description"] or "") for w in said)
            ]

        [shown] = wait_until(live, 280, 1.0)
        assert f"[MLflow run]({tracking.url}/#/experiments/" in shown["description"]
        run_id = shown["description"].rpartition("/runs/")[2].partition("?")[0]
        api = mlflow.MlflowClient(tracking_uri=tracking.url)
        wanted = {
            "training-single-learners/loss.0.0",
            "training/loss",
            "training/valid_loss",
            "system/node-0/system_memory_usage_percentage",
        }
        wait_until(lambda: wanted <= set(api.get_run(run_id).data.metrics), every_s=1.0)
        assert api.get_run(run_id).info.status == "RUNNING"
    finally:
        if runner is not None and runner.poll() is None:
            runner.send_signal(signal.SIGINT)
            try:
                runner.wait(40)
            except subprocess.TimeoutExpired:
                runner.kill()
        for server in servers:
            server.stop()
