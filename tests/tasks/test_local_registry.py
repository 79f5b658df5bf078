"""Registered models on this machine are found without MLflow, and are those that MLflow finds."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from registered import add_bundle

from flows.models import fetch_model
from tasks.tracking.fetching import download_bundle
from tasks.tracking.local_registry import registered_bundle
from tasks.tracking.runs import experiment_id


def test_version_and_alias_name_the_bundle_that_mlflow_finds(api, tmp_path):
    for number in ("one", "two"):
        add_bundle(api, tmp_path / number)
    for alias, version in (("champion", "1"), ("challenger", "2")):
        api.set_registered_model_alias("m", alias, version)
    found = [registered_bundle(f"models:/m{which}") for which in ("/1", "/2", "@champion", "@challenger")]
    assert found == [download_bundle(f"models:/m{which}") for which in ("/1", "/2", "@champion", "@challenger")]
    assert found[0] == found[2] != found[1] == found[3]
    assert fetch_model("models:/m@champion") == found[0]


@pytest.mark.parametrize(
    "uri", ["m@nosuch", "m/99", "other@champion", "m", "m/latest", "m/1/files", "m@a/b", "m' --/1"]
)
def test_what_the_registry_does_not_have_is_left_to_mlflow(api, tmp_path, uri):
    add_bundle(api, tmp_path / "one")
    assert registered_bundle(f"models:/{uri}") is None


def test_deleted_version_is_not_found(api, tmp_path):
    add_bundle(api, tmp_path / "one")
    assert registered_bundle("models:/m/1") is not None
    api.delete_model_version("m", "1")
    assert registered_bundle("models:/m/1") is None


@pytest.mark.parametrize("source", ["s3://bucket/model", "file:///nowhere"])
def test_files_elsewhere_and_files_of_other_programs_are_left_to_mlflow(api, source):
    api.create_registered_model("m")
    api.create_model_version("m", source=source, run_id=api.create_run(experiment_id(api, "e")).info.run_id)
    assert registered_bundle("models:/m/1") is None


def test_missing_or_damaged_database_is_left_to_mlflow(home):
    assert registered_bundle("models:/m/1") is None
    database = home / "mlflow" / "mlflow.db"
    assert not database.exists()
    database.parent.mkdir(parents=True)
    database.write_bytes(b"no database")
    assert registered_bundle("models:/m/1") is None


class Answers(BaseHTTPRequestHandler):
    """MLflow's REST API, of one version."""

    asked: list[str] = []
    folder = Path()

    def do_GET(self):
        self.asked.append(self.path)
        answer = {"model_version": {"version": "7"}} if "alias" in self.path else {"artifact_uri": self.folder.as_uri()}
        self.send_response(404 if "nosuch" in self.path else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, home, monkeypatch):
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "bundle.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(Answers, "asked", [])
    monkeypatch.setattr(Answers, "folder", tmp_path / "a model")
    started = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    serving = threading.Thread(target=started.serve_forever)
    serving.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{started.server_port}/")
    yield started
    started.shutdown()
    started.server_close()
    serving.join()


def test_server_is_asked_for_alias_and_place(server):
    assert registered_bundle("models:/an m@champion") == Answers.folder
    assert Answers.asked == [
        "/api/2.0/mlflow/registered-models/alias?name=an+m&alias=champion",
        "/api/2.0/mlflow/model-versions/get-download-uri?name=an+m&version=7",
    ]
    assert registered_bundle("models:/m/3") == Answers.folder
    assert registered_bundle("models:/nosuch/3") is None


def test_server_that_needs_a_password_is_left_to_mlflow(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "someone")
    assert registered_bundle("models:/m/3") is None
    assert not Answers.asked
