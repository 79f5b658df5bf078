"""The production profile end to end: the topology of docker-compose.yml as processes, with passwords and real servers.

Everything happens in one data folder: a pipeline whose objects are on S3 and whose two nodes are Prefect runs, servers
that are killed and come back, a backup, the loss of everything, and the restored registry.
"""

import base64
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support import ROOT, end_processes, environment, processes_naming, tiny_document, wait_until, write_config

from flows.servers.credentials import client_environment
from flows.servers.databases import PostgresDatabase
from flows.servers.postgres import PostgresServer, find_postgres
from flows.servers.services import ServiceError
from storage.objects import ObjectStore, ObjectStoreError

NAME = "production-test"


def missing():
    """Why this machine cannot run the profile; empty if it can."""
    try:
        find_postgres()
    except ServiceError as error:
        return str(error)
    packages = [name for name in ("psycopg2", "flask_wtf", "boto3") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(packages)}" if packages else ""


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.skipif(bool(missing()), reason=missing())]


class Production:
    """A `starling up --profile production` on a separate data folder."""

    def __init__(self, folder):
        self.folder, self.home = folder, folder / "home"
        document = tiny_document(NAME)
        document["train"] |= {"strategy": "adpsgd", "nodes": 2, "launch": {"kind": "prefect"}}
        self.config = write_config(folder / "config.yaml", document)
        self.process = None

    def up(self):
        names = ("PREFECT_", "MLFLOW_", "AWS_", "STARLING_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        words = ["up", "--profile", "production", "--folder", str(self.home), "--config", str(self.config), "--json"]
        words += [word for name in ("prefect", "mlflow", "postgres", "s3") for word in (f"--{name}-port", "0")]
        self.said = self.folder / "up.log"
        with self.said.open("ab") as errors, (self.folder / "up.out").open("wb") as out:
            command = [sys.executable, "-m", "flows.cli.app", *words]
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=errors)
        wait_until(lambda: self.note() or self.process.poll() is not None, 400)
        assert self.process.poll() is None, self.said.read_text()

    def note(self):
        path = self.home / "services.json"
        return json.loads(path.read_text()) if path.exists() else None

    def down(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(120) == 0
            self.process = None
        assert processes_naming(str(self.home)) == []

    def command(self, *words, check=True):
        """Run a command as a user who has only set the data folder."""
        names = ("PREFECT_", "MLFLOW_", "AWS_", "STARLING_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        env |= {"STARLING_HOME": str(self.home), "COLUMNS": "200"}
        command = [sys.executable, "-m", "flows.cli.app", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr[-4000:]}"
        return done

    def secret(self, name):
        return (self.home / "secrets" / name).read_text()

    def prefect(self, path, body=None, auth=True):
        url = f"{self.note()['prefect']}/api/{path}"
        return fetch(url, body, self.secret("prefect_auth") if auth else "")

    def server(self):
        port = int(self.note()["postgres"].rpartition(":")[2])
        return PostgresServer(port=port, secrets=self.home / "secrets")

    def pid_of(self, *words):
        """The one process of ours whose command line has all the words."""
        pids = []
        for pid in processes_naming(str(self.home)):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if all(word in line for word in words) and parent == self.process.pid:
                pids.append(pid)
        return pids[0] if pids else None


def fetch(url, body=None, auth=""):
    """Fetch or post JSON with a user and a password."""
    headers = {"Content-Type": "application/json"}
    if auth:
        headers["Authorization"] = "Basic " + base64.b64encode(auth.encode()).decode()
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=30) as reply:
        return json.loads(reply.read() or b"null")


def refused(url, body=None, auth=""):
    try:
        fetch(url, body, auth)
    except urllib.error.HTTPError as error:
        return error.code
    return None


@pytest.fixture(scope="module")
def production():
    # PostgreSQL runs as another user than root, who must be able to enter the folder: pytest's own is closed
    folder = Path(tempfile.mkdtemp(prefix="starling-production-")).resolve()
    folder.chmod(0o755)
    made = Production(folder)
    try:
        made.up()
        yield made
    finally:
        if made.process is not None:
            made.process.send_signal(signal.SIGTERM)
            try:
                made.process.wait(60)
            except subprocess.TimeoutExpired:
                made.process.kill()
                made.process.wait()
        end_processes(processes_naming(str(made.home)))
        shutil.rmtree(folder, ignore_errors=True)


def registry(production):
    """A client of the registry like a consumer's: address and password in the environment."""
    note = production.note()
    values = client_environment(production.home / "secrets") | note["environment"]
    return environment(MLFLOW_TRACKING_URI=note["mlflow"], STARLING_HOME=production.home, **values)


LOOK_UP = """
import sys
import mlflow
version = mlflow.MlflowClient().get_model_version_by_alias(sys.argv[1], "champion")
model = mlflow.pyfunc.load_model(f"models:/{sys.argv[1]}@champion")
print(version.version, type(model).__name__)
"""


def look_up(production):
    """Load the champion in a fresh process."""
    with registry(production):
        command = [sys.executable, "-c", LOOK_UP, NAME]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def finished_runs(production):
    flow_runs = production.prefect("flow_runs/filter", {"sort": "START_TIME_ASC"})
    return {run["id"]: run["state_type"] for run in flow_runs}


def test_every_server_asks_for_a_password(production):
    note = production.note()
    experiments = f"{note['mlflow']}/api/2.0/mlflow/experiments/search?max_results=1"
    assert refused(f"{note['prefect']}/api/flows/filter", {}) == 401
    assert refused(f"{note['prefect']}/api/flows/filter", {}, "starling:wrong") == 401
    assert production.prefect("flows/filter", {}) is not None
    assert refused(experiments) == 401
    assert refused(experiments, None, "admin:wrong-password") == 401
    assert fetch(experiments, None, f"admin:{production.secret('mlflow_admin_password')}")["experiments"]
    assert refused(f"{note['s3']}/starling") in (400, 401, 403)
    wrong = environment(AWS_SECRET_ACCESS_KEY="wrong")
    with registry(production), wrong, pytest.raises(ObjectStoreError, match="signature"):
        ObjectStore("s3://starling/objects").list()
    import psycopg2

    port = int(note["postgres"].rpartition(":")[2])
    for user, password in (("postgres", "wrong"), ("mlflow", production.secret("prefect_database_password"))):
        with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
            psycopg2.connect(host="127.0.0.1", port=port, user=user, password=password, dbname="mlflow")
    password = production.secret("mlflow_database_password")
    with pytest.raises(psycopg2.OperationalError, match="permission denied"):
        psycopg2.connect(host="127.0.0.1", port=port, user="mlflow", password=password, dbname="prefect")


def test_no_secret_is_on_a_command_line_or_in_a_log(production):
    secrets = [path.read_text() for path in (production.home / "secrets").iterdir() if path.name != "ring.key"]
    secrets += [production.secret("prefect_auth").partition(":")[2]]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_naming(str(production.home))]
    files = [p.read_bytes() for p in (production.home / "logs").glob("*.log*")] + [production.said.read_bytes()]
    files += [(production.home / name).read_bytes() for name in ("services.json", "mlflow/auth.ini")]
    assert lines
    assert not [secret for secret in secrets for text in (*lines, *files) if secret.encode() in text]
    modes = {path.stat().st_mode & 0o777 for path in (production.home / "secrets").iterdir()}
    assert modes == {0o600}


def test_pipeline_ingests_to_s3_trains_on_two_nodes_and_registers(production):
    deployment = production.prefect(f"deployments/name/pipeline/{NAME}")
    run = production.prefect(f"deployments/{deployment['id']}/create_flow_run", {"state": {"type": "SCHEDULED"}})
    ended = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
    wait_until(lambda: production.prefect(f"flow_runs/{run['id']}")["state_type"] in ended, 1200, 2.0)
    state = production.prefect(f"flow_runs/{run['id']}")["state"]
    assert state["type"] == "COMPLETED", f"{state}\n{(production.home / 'logs' / 'worker.log').read_text()[-3000:]}"
    nodes = [r for r in production.prefect("flow_runs/filter", {}) if r["name"].startswith("node ")]
    assert len({r["parameters"]["node_rank"] for r in nodes}) == 2
    shards = list((production.home / "s3" / "starling" / "objects").rglob("*.tar"))
    assert shards
    assert not (production.home / "objects").exists()
    assert list((production.home / "s3" / "mlflow" / "artifacts").rglob("*.safetensors"))
    assert look_up(production) == ["1", "PyFuncModel"]


def test_command_line_finds_servers_and_passwords_by_itself(production):
    """All stages are done: the run finds their outputs on the servers with only the data folder set."""
    done = production.command("run", production.config, "--json")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary
    assert not (production.home / "objects").exists()
    deployed = json.loads(production.command("deploy", "--config", production.config, "--json").stdout)
    assert f"pipeline/{NAME}" in {entry["deployment"] for entry in deployed["deployments"]}
    none = production.command("search", "status", check=False)
    assert "there is no study yet" in none.stderr
    assert not (production.home / "search").exists()  # it has asked PostgreSQL


def test_killed_servers_are_restarted_with_their_data(production):
    before = finished_runs(production)
    for words in (["serve", "s3"], ["mlflow", "server"], ["prefect_server"], ["postgres", "-D"], ["worker", "default"]):
        pid = wait_until(lambda words=words: production.pid_of(*words))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda words=words, pid=pid: production.pid_of(*words) not in (None, pid))

    def well():
        try:
            return finished_runs(production).items() >= before.items()
        except OSError:
            return False

    wait_until(well, every_s=1.0)
    experiments = f"{production.note()['mlflow']}/api/2.0/mlflow/experiments/search?max_results=1"
    auth = f"admin:{production.secret('mlflow_admin_password')}"
    wait_until(lambda: rejected_or_disconnected(experiments, auth) is None, every_s=1.0)
    assert look_up(production) == ["1", "PyFuncModel"]
    assert "restarting it" in production.said.read_text()


def rejected_or_disconnected(url, auth):
    try:
        return refused(url, None, auth)
    except OSError as error:
        return error


def test_backup_restores_everything_after_total_loss(production):
    runs, kept = finished_runs(production), production.folder / "backups"
    figures = json.loads(production.command("backup", "--to", kept, "--json").stdout)
    assert figures["artifacts"] > 0
    assert Path(urlsplit(figures["backup"]).path).stat().st_mode & 0o077 == 0
    running = production.command("restore", "--from", kept, check=False)
    assert running.returncode == 1
    assert "stop `starling up` first" in running.stderr.replace("\n", " ")
    busy = PostgresDatabase("prefect", production.server())
    assert busy.has_data()
    old = production.secret("mlflow_admin_password")
    production.down()
    shutil.rmtree(production.home)
    production.command("restore", "--from", kept)
    again = production.command("restore", "--from", kept, check=False)
    assert again.returncode == 1
    assert "--force overwrites" in again.stderr.replace("\n", " ")
    production.command("restore", "--from", kept, "--force")
    production.up()
    assert production.secret("mlflow_admin_password") != old  # new passwords are in force
    assert look_up(production) == ["1", "PyFuncModel"]
    restored = finished_runs(production)
    assert {key: state for key, state in restored.items() if key in runs and state == "COMPLETED"} == {
        key: state for key, state in runs.items() if state == "COMPLETED"
    }
    assert production.prefect(f"deployments/name/pipeline/{NAME}")


def test_no_process_is_left_after_shutdown(production):
    production.down()
    assert production.note() is None
