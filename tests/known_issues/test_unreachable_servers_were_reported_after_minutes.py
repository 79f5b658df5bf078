"""A run whose MLflow, Prefect or object store was unreachable trained first, and reported it minutes later or never."""

import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from support import environment, starling, tiny_document, write_config

from flows.cli import doctor
from flows.cli.run import execute, execute_folds
from flows.pipeline import pipeline, train
from tasks.config.pipeline import parse_config
from tasks.locking import leases
from tasks.orchestration import reachable
from tasks.orchestration.reachable import UnreachableError, check_mlflow, check_prefect, check_servers, check_store

REFUSES = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_cached_answers(monkeypatch, home):
    monkeypatch.setattr(reachable, "_answered", set())
    monkeypatch.setattr(reachable, "_PAUSE_S", 0.01)
    monkeypatch.setattr(leases, "_WAITS_S", (0.0, 0.0))


@contextmanager
def all_servers_at(url):
    """Sets this URL as the address of MLflow, Prefect and the object store."""
    keys = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "something"}
    servers = {"MLFLOW_TRACKING_URI": url, "PREFECT_API_URL": f"{url}/api", "STARLING_OBJECTS": "s3://bucket/objects"}
    with environment(**keys, **servers), temporary_settings({PREFECT_API_URL: f"{url}/api"}):
        yield url


@pytest.fixture
def refusing():
    """An address where nothing listens."""
    with all_servers_at(REFUSES) as url:
        yield url


@pytest.fixture
def hanging(monkeypatch):
    """An address that accepts connections and never answers."""
    monkeypatch.setattr(reachable, "REQUEST_S", 1.0)  # MLflow takes whole seconds
    monkeypatch.setattr(reachable, "_LATER_S", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        all_servers_at(f"http://127.0.0.1:{listener.getsockname()[1]}") as u,
    ):
        yield u


@pytest.fixture
def locked():
    """A server that rejects every user."""

    class Handler(BaseHTTPRequestHandler):
        def refuse(self):
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = do_HEAD = refuse

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    with all_servers_at(f"http://127.0.0.1:{server.server_port}") as url:
        yield url
    server.shutdown()
    server.server_close()


CHECKS = [
    (check_mlflow, "MLflow at", "unset MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD"),
    (check_prefect, "the Prefect server at", "unset PREFECT_API_URL", "PREFECT_API_AUTH_STRING"),
    (check_store, "the object store s3://bucket/objects at", "correct AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY"),
]
IDS = ["mlflow", "prefect", "store"]


@pytest.mark.parametrize(("check", "what", "remedy", "_"), CHECKS, ids=IDS)
@pytest.mark.parametrize("kind", ["refusing", "hanging"])
def test_unreachable_server_is_reported_with_a_remedy(request, kind, check, what, remedy, _):
    url = request.getfixturevalue(kind)
    with pytest.raises(UnreachableError) as caught:
        check()
    assert f"{what} {url}" in str(caught.value)
    assert "does not answer" in caught.value.trouble
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(("check", "what", "_", "variable"), CHECKS, ids=IDS)
def test_wrong_password_is_not_reported_as_an_outage(locked, check, what, _, variable):
    with pytest.raises(UnreachableError, match="refuses the password") as caught:
        check()
    assert f"{what} {locked}" in str(caught.value)
    assert variable in caught.value.remedy


def test_only_runs_that_register_need_mlflow(refusing):
    config, said = parse_config(tiny_document()), []
    with environment(STARLING_OBJECTS=None):
        check_servers(config, "features", said.append, 0.0)
        assert said == []
        check_servers(config, "score", said.append, 0.0)
        assert "metrics wait in the journal" in said[-1]
        with pytest.raises(UnreachableError, match="starling run --until score"):
            check_servers(config, "register", said.append, 0.0)


def test_check_waits_for_a_server_that_comes_back():
    said, replies = [], [ConnectionRefusedError(111, "refused"), None]

    def ask():
        if failure := replies.pop(0):
            raise failure

    reachable._ask("it", ask, "start it", "password", 20.0, said.append)
    assert said == ["it does not answer; waiting for it"]


@pytest.mark.parametrize(
    "begin",
    [
        lambda path, config: execute(path, [], "", "report", no_prefect=True),
        lambda path, config: execute(path, [], "", "report", no_prefect=False),
        lambda path, config: execute_folds(path, [], 2, "", no_prefect=True),
        lambda path, config: pipeline.fn(config),
        lambda path, config: train.fn(config),
    ],
    ids=["plain", "run", "folds", "worker", "train flow"],
)
def test_commands_do_not_start_without_their_servers(locked, home, tmp_path, begin):
    path = write_config(tmp_path / "tiny.json", tiny_document())
    with pytest.raises(UnreachableError):
        begin(path, parse_config(tiny_document()))
    assert not [folder for folder in ("corpora", "objects", "prefect", "work") if (home / folder).exists()]


def test_doctor_reports_unreachable_servers(locked):
    findings = {finding.check: finding for check in (doctor.check_servers, doctor.check_store) for finding in check()}
    assert set(findings) == {"MLFLOW_TRACKING_URI", "PREFECT_API_URL", "object store"}
    for finding in findings.values():
        assert finding.state == "error"
        assert "refuses the password" in finding.found
        assert finding.remedy.startswith("set ")
    assert doctor.check_servers in doctor.CHECKS


@pytest.mark.slow
def test_remedies_in_the_message_work_as_written(tmp_path):
    """The remedies in the message work as written."""
    home, config = tmp_path / "home", write_config(tmp_path / "tiny.json", tiny_document())
    refused = starling("run", config, home=home, check=False, MLFLOW_TRACKING_URI=REFUSES)
    assert refused.returncode == 1
    assert f"MLflow at {REFUSES} does not answer" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (home / "work").exists()
    deferred = starling("run", config, "--until", "score", home=home, MLFLOW_TRACKING_URI=REFUSES)
    assert "metrics wait in the journal" in deferred.stderr
    assert "models:/tiny/1" in starling("run", config, "--json", home=home).stdout
