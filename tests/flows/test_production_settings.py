"""Settings of the production profile's servers; test_production.py runs them."""

import itertools
import shutil
from types import SimpleNamespace

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from flows.servers import production
from flows.servers.credentials import NAMES, make_secrets, read_secret
from flows.servers.postgres import PostgresCluster
from flows.servers.production import Ports
from flows.servers.services import ServiceError


@pytest.fixture
def secrets(tmp_path):
    make_secrets(tmp_path / "secrets")
    return tmp_path / "secrets"


@pytest.fixture
def cluster(secrets, tmp_path):
    return PostgresCluster(port=5433, secrets=secrets, folder=tmp_path / "postgres")


@pytest.fixture
def spawned(home, monkeypatch):
    """Services that would have been started: name, command, URL, health and environment."""
    calls = []
    monkeypatch.setattr(production, "spawn", lambda *given: calls.append(given) or SimpleNamespace(name=given[0]))
    return calls


def passwords_in(environment, secrets):
    """The passwords in an environment, by variable."""
    by_text = {read_secret(secrets, name): name for name in NAMES}
    return {name: by_text[value] for name, value in environment.items() if value in by_text}


def test_each_server_gets_only_its_own_passwords(spawned, cluster, secrets):
    prefect = production.prefect_database(cluster)
    assert passwords_in(prefect, secrets) == {
        "PREFECT_SERVER_DATABASE_PASSWORD": "prefect_database_password",
        "PREFECT_SERVER_API_AUTH_STRING": "prefect_auth",
        "PREFECT_API_AUTH_STRING": "prefect_auth",
    }
    assert (prefect["PREFECT_SERVER_DATABASE_PORT"], prefect["PREFECT_SERVER_DATABASE_USER"]) == ("5433", "prefect")
    production.start_mlflow(5000, cluster, "http://127.0.0.1:8333")
    production.start_s3(8333, secrets)
    (mlflow, command, url, health, environment), (s3, s3_command, _, s3_health, s3_environment) = spawned
    assert (mlflow, url, health) == ("mlflow", "http://127.0.0.1:5000", "http://127.0.0.1:5000/health")
    assert passwords_in(environment, secrets) == {
        "PGPASSWORD": "mlflow_database_password",
        "MLFLOW_AUTH_ADMIN_PASSWORD": "mlflow_admin_password",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "mlflow_secret_key",
        "AWS_ACCESS_KEY_ID": "s3_access_key",
        "AWS_SECRET_ACCESS_KEY": "s3_secret_key",
    }
    assert environment["AWS_ENDPOINT_URL"] == "http://127.0.0.1:8333"
    assert environment["AWS_REQUEST_CHECKSUM_CALCULATION"] == "when_required"
    keys = [read_secret(secrets, f"s3_{name}_key") for name in ("access", "secret")]
    assert (s3, s3_health, s3_environment) == (
        "s3",
        "tcp://127.0.0.1:8333",
        {"RCLONE_AUTH_KEY": '"{},{}"'.format(*keys)},
    )
    said = " ".join([*command, *s3_command, environment["MLFLOW_AUTH_CONFIG_PATH"]])
    assert not any(read_secret(secrets, name) in said for name in NAMES)


def test_mlflow_requires_a_password_and_proxies_artifacts(spawned, cluster):
    production.start_mlflow(5000, cluster, "http://s3")
    _, command, _, _, environment = spawned[0]
    options = dict(itertools.pairwise(command))
    assert options["--app-name"] == "basic-auth"
    assert options["--host"] == "127.0.0.1"
    assert options["--backend-store-uri"] == "postgresql+psycopg2://mlflow@127.0.0.1:5433/mlflow"
    assert options["--artifacts-destination"] == "s3://mlflow/artifacts"
    assert "--serve-artifacts" in command
    lines = open(environment["MLFLOW_AUTH_CONFIG_PATH"]).read().splitlines()  # noqa: SIM115
    assert lines[0] == "[mlflow]"
    assert "default_permission = READ" in lines
    assert "admin_username = admin" in lines
    assert any(line.endswith("authenticate_request_basic_auth") for line in lines)


def test_buckets_exist_before_the_s3_server_starts(spawned, secrets, home):
    production.start_s3(8333, secrets)
    assert sorted(path.name for path in (home / "s3").iterdir()) == ["mlflow", "starling"]
    assert spawned[0][1][-3:] == ["--addr", "127.0.0.1:8333", str(home / "s3")]


def test_s3_server_is_found_beside_python_or_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(production.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert production.find_rclone() == "/usr/bin/rclone"
    (tmp_path / "rclone").touch()
    assert production.find_rclone() == str(tmp_path / "rclone")
    (tmp_path / "rclone").unlink()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ServiceError, match="rclone, which serves S3, is not installed.*pip install"):
        production.find_rclone()


class Supervisor:
    """Records actions in order."""

    def __init__(self, done, stop=None):
        self.done, self.stop = done, stop

    def add(self, start):
        self.done.append(start())

    def wait(self, stop=None):
        self.done.append("wait")
        if self.stop is not None:
            self.stop.set()


@pytest.fixture
def done(monkeypatch, secrets):
    """Actions that start the servers, in order."""
    calls = []
    monkeypatch.setenv("STARLING_SECRETS", str(secrets))
    monkeypatch.setattr(production, "check_packages", lambda: calls.append("packages"))
    for name in ("prepare", "start", "make_databases", "renew_mlflow_admin"):
        monkeypatch.setattr(
            PostgresCluster, name, lambda self, name=name: calls.append(name) or f"{name}ed at {self.port}"
        )
    for name in ("start_s3", "start_prefect", "start_mlflow"):
        monkeypatch.setattr(production, name, lambda port, *_, name=name: f"{name} {port}")
    return calls


def test_servers_start_in_order_of_their_dependencies(home, done, secrets):
    note = production.start_servers(Supervisor(done), Ports(1, 2, 3, 4))
    stores = ["prepare", "start", "started at 3", "start_s3 4", "wait", "make_databases", "renew_mlflow_admin"]
    assert done == ["packages", *stores, "start_prefect 1", "start_mlflow 2"]
    assert {name: note[name] for name in ("prefect", "mlflow", "postgres", "s3")} == {
        "prefect": "http://127.0.0.1:1",
        "mlflow": "http://127.0.0.1:2",
        "postgres": "127.0.0.1:3",
        "s3": "http://127.0.0.1:4",
    }
    clients = production.environment_of(note)
    assert clients["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert clients["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:2"
    assert clients["AWS_ENDPOINT_URL"] == "http://127.0.0.1:4"
    assert clients["STARLING_OBJECTS"] == "s3://starling/objects"
    assert clients["STARLING_STUDIES"] == "postgresql+psycopg2://studies@127.0.0.1:3/studies"
    assert clients["STARLING_STUDIES_PASSWORD"] == read_secret(secrets, "studies_database_password")
    assert read_secret(secrets, "studies_database_password") not in str(note)
    assert clients["MLFLOW_TRACKING_PASSWORD"] == read_secret(secrets, "mlflow_admin_password")
    assert read_secret(secrets, "mlflow_admin_password") not in str(note)
    small = production.environment_of({"prefect": "http://p", "mlflow": "http://m"})
    assert not passwords_in(small, secrets)


def test_no_database_is_created_after_an_interrupted_start(home, done):
    import threading

    stop = threading.Event()
    production.start_stores(Supervisor(done, stop), Ports(1, 2, 3, 4), home, stop)
    assert done[-1] == "wait"


def refusal(status, code):
    return ClientError({"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}, "CreateBucket")


@pytest.fixture
def s3(monkeypatch):
    """An S3 server that gives these answers, one after another, and what it was asked."""
    site = SimpleNamespace(answers=[], asked=[])

    def create_bucket(Bucket):
        site.asked.append(Bucket)
        if site.answers and (answer := site.answers.pop(0)) is not None:
            raise answer

    client = SimpleNamespace(create_client=lambda *_, **__: SimpleNamespace(create_bucket=create_bucket))
    monkeypatch.setattr("botocore.session.get_session", lambda: client)
    monkeypatch.setattr(production.time, "sleep", lambda _: None)
    return site


def test_buckets_are_created_once_the_server_has_started(s3):
    s3.answers = [BotoCoreError(), refusal(503, "SlowDown"), None, refusal(409, "BucketAlreadyOwnedByYou")]
    production.make_buckets()
    assert s3.asked == ["starling"] * 3 + ["mlflow"]


@pytest.mark.parametrize(
    ("answers", "patience_s", "message"),
    [
        ([refusal(403, "AccessDenied")], 60, "does not create the bucket starling: .*AccessDenied"),
        ([refusal(503, "SlowDown")] * 2, -1, "does not create the bucket starling"),
        ([None, *[BotoCoreError()] * 2], -1, "the S3 server does not answer"),
    ],
)
def test_failure_to_create_a_bucket_is_reported(s3, answers, patience_s, message):
    s3.answers = list(answers)
    with pytest.raises(ServiceError, match=message):
        production.make_buckets(patience_s)
    assert len(s3.asked) == answers.index(next(filter(None, answers))) + 1
