"""Options of `starling up` and `starling secrets`, and the order in which `up` starts and stops its servers."""

import json
import os
import signal
import socket
from types import SimpleNamespace

import pytest
from command_line import invoke

from flows.cli import up as serve

pytestmark = pytest.mark.usefixtures("wide")


# --- servers and deployments


@pytest.fixture
def restored_signals(monkeypatch):
    """`up` ends on Ctrl-C, these tests do as before."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve, "adopt_orphans", lambda: None)


def test_port_options_of_up(recorder, home, restored_signals, monkeypatch, tmp_path):
    seen = []

    def check(profile, ports):
        seen.append((profile.value, ports.prefect, ports.mlflow, ports.postgres, ports.s3))
        raise ValueError("seen")

    monkeypatch.setattr(serve, "_check_ports", check)
    monkeypatch.setenv("STARLING_HOME", str(home))
    invoke("up", code=1)
    names = ("prefect", "mlflow", "postgres", "s3")
    words = [word for number, name in enumerate(names, 1) for word in (f"--{name}-port", number)]
    invoke("up", *words, "--profile", "production", "--folder", tmp_path / "other", code=1)
    assert seen == [("small", 4200, 5000, 5433, 8333), ("production", 1, 2, 3, 4)]
    from tasks.config.home import home as data_folder

    assert data_folder() == tmp_path / "other"


class Keeper:
    """A supervisor that only records its calls."""

    def __init__(self, done, interrupt):
        self.done, self.interrupt, self.services = done, interrupt, []

    def __call__(self, restarts, say):
        return self

    def add(self, start):
        self.services.append(start())
        return self.services[-1]

    def wait(self, stop):
        self.done.append("wait")

    def check(self):
        self.done.append("check")
        self.interrupt()

    def reap(self):
        self.done.append("reap")

    def stop(self, *given):
        self.done.append(("stop", *given))


@pytest.mark.parametrize(("profile", "number"), [("small", signal.SIGINT), ("production", signal.SIGTERM)])
def test_up_runs_until_a_signal_and_shuts_down_in_order(recorder, home, monkeypatch, profile, number):
    from flows.servers import production, services

    def server(name, port=0):
        return SimpleNamespace(name=name, url=f"http://{name}:{port}", process=SimpleNamespace(pid=name))

    home.mkdir()
    handlers, done = {}, []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(serve, "adopt_orphans", lambda: done.append("adopt"))
    keeper = Keeper(done, lambda: (done.append(services.note_path().exists()), handlers[number](number, None)))
    monkeypatch.setattr("flows.servers.supervisor.Supervisor", keeper)
    for name in ("prefect", "mlflow"):
        monkeypatch.setattr(services, f"start_{name}", lambda port, name=name: server(name, port))

    def start_all(supervisor, ports, stop):
        return {name: supervisor.add(lambda name=name: server(name)).url for name in ("prefect", "mlflow")}

    monkeypatch.setattr(production, "start_servers", start_all)
    monkeypatch.setattr(serve, "_check_ports", lambda *_: None)
    monkeypatch.setattr(serve, "_LOOK_S", 0.01)
    deployed = recorder("flows.cli.up.deploy_all", [{"deployment": "train/x", "schedule": ""}])
    monkeypatch.setenv("STARLING_NOTIFY_URL", "https://hooks.example.com/x")
    workers = recorder("flows.cli.up._workers", [lambda: server("worker")])
    monkeypatch.setattr(
        "flows.servers.local_runs.end_runs", lambda workers, _: done.append([worker.name for worker in workers])
    )
    monkeypatch.setattr("flows.servers.prefect_api.send_the_rest", lambda _: done.append("send"))
    monkeypatch.setattr(services, "end_orphans", lambda keep, _: done.append(("orphans", keep)))
    monkeypatch.setattr(serve, "end_now", lambda: done.append("end"))
    for name in {"PREFECT_API_URL", "MLFLOW_TRACKING_URI", *services.prefect_environment()} - {"STARLING_HOME"}:
        monkeypatch.setenv(name, "")  # taken back at the end
    printed = json.loads(invoke("up", "--profile", profile, "--prefect-port", 1, "--mlflow-port", 2, "--json").stdout)
    ports = (1, 2) if profile == "small" else (0, 0)
    assert printed["urls"] == {"prefect": f"http://prefect:{ports[0]}", "mlflow": f"http://mlflow:{ports[1]}"}
    assert os.environ["PREFECT_API_URL"] == f"{printed['urls']['prefect']}/api"
    assert workers == [(["train/x"], None)]
    assert deployed == [(None, {"notify_url": "https://hooks.example.com/x"})]
    assert done[:4] == ["adopt", "wait", "check", True]
    workers_end = [["worker"], ("stop", 2, serve._WORKERS_S), ("orphans", {"prefect", "mlflow", "worker"}), "send"]
    stores = production.STORES if profile == "production" else 0
    assert done[4:] == ["reap", *workers_end, ("stop", stores, serve._SERVERS_S), ("stop", 0, 20.0), "end"]
    assert not services.note_path().exists()


@pytest.mark.parametrize("name", ["prefect", "mlflow", "postgres", "s3"])
def test_taken_port_is_named_with_its_option(home, restored_signals, name):
    from flows.servers.production import Ports

    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ports = Ports(**{other: number if other == name else 0 for other in ("prefect", "mlflow", "postgres", "s3")})
        ports = ports.chosen()
        assert len({ports.prefect, ports.mlflow, ports.postgres, ports.s3} - {0}) == 4
        with pytest.raises(ValueError, match=rf"port {number} is taken: .* with --{name}-port"):
            serve._check_ports(serve.Profile.production, ports)
        if name in ("postgres", "s3"):
            serve._check_ports(serve.Profile.small, ports)


def test_up_prints_the_servers_addresses(capsys):
    note = {"prefect": "http://p", "mlflow": "http://m", "postgres": "h:1", "s3": "http://s", "secrets": "/secrets"}
    deployed = [
        {"deployment": "pipeline/x", "schedule": "15 2 * * *", "timezone": "Asia/Tokyo", "id": 1},
        {"deployment": "train/x", "schedule": ""},
    ]
    serve._announce(note | {"environment": {}}, deployed, True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "urls": {name: note[name] for name in ("prefect", "mlflow", "postgres", "s3")},
        "deployments": deployed,
        "secrets": "/secrets",
    }
    serve._announce({"prefect": "http://p", "mlflow": "http://m"}, [], True)
    assert json.loads(capsys.readouterr().out) == {
        "urls": {"prefect": "http://p", "mlflow": "http://m"},
        "deployments": [],
    }


def test_up_says_that_nothing_is_scheduled(capsys):
    serve._announce({"prefect": "http://p", "mlflow": "http://m"}, [], False)
    said = capsys.readouterr().out
    assert "nothing is scheduled: starling deploy --config my.yaml, or starling up --config my.yaml" in said
    assert "deployment " not in said  # no empty table
    serve._announce({"prefect": "http://p"}, [{"deployment": "train/x", "schedule": ""}], False)
    said = capsys.readouterr().out
    assert "train/x" in said
    assert "nothing is scheduled" not in said
    nightly = {"deployment": "pipeline/x", "schedule": "15 2 * * *", "timezone": "Asia/Tokyo"}
    serve._announce({"prefect": "http://p"}, [nightly], False)
    assert [cell.strip() for cell in capsys.readouterr().out.splitlines()[4].strip("│").split("│")] == [
        *nightly.values()
    ]


# --- recognition


@pytest.fixture
def started(monkeypatch):
    """What `up` starts as recognition server."""
    calls = []

    def spawn(name, command, url, health, env=None, end=signal.SIGTERM):
        calls.append(SimpleNamespace(name=name, command=command, url=url, health=health, env=env, end=end))
        return calls[-1]

    monkeypatch.setattr("flows.servers.services.spawn", spawn)
    return calls


def test_recognition_listens_on_loopback_and_has_its_token_from_its_file(home, started, tmp_path):
    from flows.servers.credentials import make_secrets

    make_secrets(tmp_path / "secrets")
    server = serve.RecognitionServer("m", 8123, tmp_path / "kept")
    serve.start_recognition(server, {"secrets": str(tmp_path / "secrets")})
    serve.start_recognition(server, {})
    production, small = started
    options = ["--wait", "--host", "127.0.0.1", "--port", "8123", "--collect", str(tmp_path / "kept")]
    assert production.command[3:] == ["serve", "m", *options] == small.command[3:]
    token = (tmp_path / "secrets" / "serve_token").read_text()
    assert production.env == {"STARLING_SERVE_TOKEN": token}
    assert token not in production.command
    assert small.env == {}
    assert (small.url, small.health) == ("http://127.0.0.1:8123", "")  # not waited for: its model may come later


def test_recognition_is_started_if_it_is_wanted(home, restored_signals, monkeypatch):
    asked = []
    monkeypatch.setattr(serve, "_check_ports", lambda *_: None)
    monkeypatch.setattr(serve, "_check_port", lambda *given: asked.append(given))
    monkeypatch.setattr(serve, "_serve", lambda *given: asked.append(given[-1]))
    monkeypatch.setattr(serve, "end_now", lambda: None)
    invoke("up", "--folder", home)
    invoke("up", "--folder", home, "--serve", "m", "--serve-port", 8123)
    assert asked == [None, ("serve", 8123), serve.RecognitionServer("m", 8123)]
    assert "--collect needs --serve MODEL" in invoke("up", "--folder", home, "--collect", home, code=1).stderr
    assert "nor the name of a model" in invoke("up", "--folder", home, "--serve", "a b", code=1).stderr


def test_requests_end_while_flow_runs_do(monkeypatch):
    done = []

    def service(name):
        return SimpleNamespace(
            name=name,
            ask_to_end=lambda: done.append(("ask", name)),
            see_end=lambda patience: done.append(("see", name)),
        )

    monkeypatch.setattr("flows.servers.local_runs.end_runs", lambda workers, _: done.append([w.name for w in workers]))
    serve._end_work([service("worker"), service("serve"), service("worker-nodes")])
    assert done == [("ask", "serve"), ["worker", "worker-nodes"], ("see", "serve")]


def test_recognition_is_announced(capsys):
    note = {"prefect": "http://p", "mlflow": "http://m", "serve": "http://s", "secrets": "/secrets"}
    serve._announce(note, [], True)
    assert json.loads(capsys.readouterr().out)["urls"]["serve"] == "http://s"
    serve._announce(note, [], False)
    said = capsys.readouterr().out
    assert "recognition http://s" in said
    assert "recognition: serve_token" in said


def test_secrets_are_created_in_the_given_folder(home, tmp_path):
    made = json.loads(invoke("secrets", tmp_path / "x", "--json").stdout)
    assert made["folder"] == str(tmp_path / "x")
    assert "prefect_auth" in made["made"]
    assert "made nothing, all exist" in invoke("secrets", tmp_path / "x", "--for-containers").stdout
    assert (tmp_path / "x" / "prefect_auth").stat().st_mode & 0o777 == 0o444
    assert f"{home / 'secrets'}: made postgres_password, " in invoke("secrets").stdout
