"""MLflow dies in the middle of a real training with two learners: no step and, in the end, no metric is lost."""

import json
import os
import signal
import threading
import time
from contextlib import suppress

import mlflow
import pytest
from support import environment, processes_naming, slow_nodes, starling, tiny_document, wait_until, write_config

from flows.servers.services import start_mlflow
from tasks.tracking.metrics import Translator
from training.coordinator.journal import read_journal

AWAY_S = 30
SLOW = slow_nodes({0: 12, 1: 12})


def kill_server(home, service):
    for pid in processes_naming(str(home)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    service.process.wait()
    wait_until(lambda: not processes_naming(str(home)))


def journal_of(home):
    return next(iter(home.glob("work/train-*/journal.jsonl")), None)


def count_steps(home):
    journal = journal_of(home)
    return sum(entry["kind"] == "step" for entry in read_journal(journal)) if journal else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mlflow_outage_costs_no_step_and_loses_no_metric(tmp_path):
    document = tiny_document()
    document["storage"] = {"shard_seconds": 8, "workers": 2}
    document["train"] |= {"strategy": "adpsgd", "nodes": 2, "epochs": 30}
    config = write_config(tmp_path / "tiny.yaml", document)
    server_home, home = tmp_path / "server", tmp_path / "home"
    server_home.mkdir()
    home.mkdir()
    done = []
    with environment(STARLING_HOME=server_home, MLFLOW_TRACKING_URI=None):
        service = start_mlflow().wait()
        url, port = service.url, int(service.url.rpartition(":")[2])
        try:
            words = ("run", config, "--no-prefect", "--json")
            run = threading.Thread(
                target=lambda: done.append(starling(*words, home=home, timeout=500, MLFLOW_TRACKING_URI=url, **SLOW))
            )
            run.start()
            wait_until(lambda: count_steps(home) > 10 or not run.is_alive())
            kill_server(server_home, service)
            before = count_steps(home)
            time.sleep(AWAY_S)
            assert run.is_alive(), "the outage must lie within the training"
            assert count_steps(home) > before + 10
            service = start_mlflow(port).wait()
            run.join(400)
            summary = json.loads(done[0].stdout)
            assert summary["model_uri"] == "models:/tiny/1"
            api = mlflow.MlflowClient(tracking_uri=url)
            run_id = api.get_model_version("tiny", "1").run_id
            translator, expected = Translator(), {}
            for entry in read_journal(journal_of(home)):
                for point in translator.feed(entry):
                    expected.setdefault(point.name, []).append((point.step, point.value))
            assert {
                "training-single-learners/loss.0.0",
                "training-single-learners/loss.1.0",
                "training/valid_loss",
            } <= expected.keys()
            for name, points in expected.items():
                sent = {(metric.step, metric.value) for metric in api.get_metric_history(run_id, name)}
                assert set(points) <= sent, name
        finally:
            kill_server(server_home, service)
