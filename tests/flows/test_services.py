import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import ROOT, processes_naming, wait_until

from flows.cli.common import say_prefect
from flows.servers import prefect_api, services
from flows.servers.services import ServiceError, answers, free_port, note_path, running_services, spawn

SERVER = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def a_server(home, code=SERVER):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    return spawn("server", [sys.executable, "-c", code, str(port)], url, url + "/")


def test_service_is_awaited_and_stopped(home):
    service = a_server(home).wait(240)
    assert service.health == service.url + "/"
    assert answers(service.health)
    service.stop()
    assert service.process.returncode is not None
    assert not answers(service.health)
    service.stop()


def test_service_that_ends_by_itself_is_reported_with_its_log(home):
    service = a_server(home, "print('port is cursed'); raise SystemExit(3)")
    with pytest.raises(ServiceError, match=r"(?s)ended with status 3: the end of .*server\.log.*port is cursed"):
        service.wait(240)


def test_silent_service_is_given_up_and_an_unresponsive_one_killed(home):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    service = a_server(home, code)
    wait_until(lambda: "deaf" in service.log.read_text())
    with pytest.raises(ServiceError, match="did not answer at http"):
        service.wait(0.3)
    service.stop(0.2)
    assert service.process.returncode == -signal.SIGKILL


def test_waiting_ends_on_request(home):
    service = a_server(home, "import time; time.sleep(600)")
    stop = threading.Event()
    stop.set()
    service.wait(240, stop)
    service.stop()


@pytest.mark.parametrize("reply", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.0 500 Broken\r\n\r\n"])
def test_other_listener_does_not_count_as_the_service(reply):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(reply)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        assert not answers(f"http://127.0.0.1:{server.getsockname()[1]}/", 2)
        thread.join()


def test_a_free_port_is_none_that_connections_are_given_before_its_server_listens():
    handed_out = range(*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    ports = [free_port() for _ in range(50)]
    assert not set(ports) & set(handed_out)
    assert len(set(ports)) > 40  # servers that start at the same time get different ones


def test_nothing_answers_at_a_free_port():
    with socket.socket() as taken:  # nobody else may use it meanwhile
        taken.bind(("127.0.0.1", port := free_port()))
        assert not answers(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize("note", [None, "", "{", "[]", '{"prefect": "http://127.0.0.1:1"}'])
def test_note_of_servers_that_have_ended_is_ignored(home, note):
    home.mkdir()
    if note is not None:
        note_path().write_text(note)
    assert running_services() == {}


PARENT = """
import sys, time
from flows.servers.services import spawn
child = spawn("child", [sys.executable, "-c", "import time; time.sleep(100)"], "", "")
print(child.process.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.real_interpreter
def test_service_ends_with_its_killed_parent(home):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=env, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert child in processes_naming(str(home))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not processes_naming(str(home)))


ADOPTER = """
import subprocess, sys, time
from flows.servers import prefect_api
from flows.servers import services
from training.processes.children import adopt_orphans, children
adopt_orphans()
kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
# a child that leaves two children, one of which ignores SIGTERM
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
codes = ["import time; time.sleep(100)", stubborn]
code = f"import subprocess, sys; [subprocess.Popen([sys.executable, '-c', c]) for c in {codes!r}]"
subprocess.run([sys.executable, "-c", code])
while len(children()) < 3:
    time.sleep(0.02)
print(len(children()), flush=True)
services.end_orphans({kept.pid}, 0.3)
print(children() == [kept.pid], flush=True)
kept.kill()
"""


@pytest.mark.real_interpreter
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt")
def test_orphans_are_adopted_and_ended(home):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ADOPTER], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["3", "True"], done.stderr
    assert processes_naming(str(home)) == []


def test_environment_keeps_data_local_and_below_the_data_folder(home):
    environment = services.prefect_environment()
    assert environment["PREFECT_HOME"].startswith(str(home))
    assert environment["STARLING_HOME"] == str(home)
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert environment["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"


@pytest.fixture
def orchestrated(home, monkeypatch):
    """When a run's own server starts and ends."""
    home.mkdir()
    done = []

    @contextmanager
    def own(say):
        say("starting the Prefect server")
        done.append("begun")
        yield "http://own"
        done.append("ended")

    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(prefect_api, "set_prefect_defaults", lambda: None)
    monkeypatch.setattr(prefect_api, "private_server", own)
    return done


def test_private_server_of_a_run_ends_with_it(orchestrated):
    said = []
    with prefect_api.orchestration(said.append) as url:
        assert (url, os.environ["PREFECT_API_URL"]) == ("http://own", "http://own/api")
        assert orchestrated == ["begun"]
    assert said == ["starting the Prefect server"]
    assert orchestrated == ["begun", "ended"]
    assert "PREFECT_API_URL" not in os.environ


def test_libraries_of_flows_are_imported_while_the_server_starts(home, monkeypatch):
    steps = []

    class Starting:
        def __init__(self, *_, **__):
            self.url = "http://server"

        def add(self, start):
            steps.append("start")
            return self

        def wait(self):
            steps.append("wait")

        def check(self):
            pass

        def stop(self, **_):
            steps.append("stop")

    monkeypatch.setattr(prefect_api, "Supervisor", Starting)
    monkeypatch.setattr(prefect_api, "import_module", steps.append)
    with prefect_api.private_server(lambda _: None) as url:
        assert url == "http://server"
    assert steps == ["start", "torch", "mlflow", "wait", "stop"]


def test_address_of_a_private_server_is_said_to_end_with_the_run(orchestrated, monkeypatch, capsys):
    with prefect_api.orchestration() as url:
        say_prefect(url)
    said = capsys.readouterr().err
    assert said == "Prefect at http://own (until this run ends; `starling up` keeps a server)\n"
    monkeypatch.setattr(prefect_api, "running_services", lambda: {"prefect": "http://up"})
    with prefect_api.orchestration() as url:
        say_prefect(url)
    assert capsys.readouterr().err == "Prefect at http://up\n"


def test_servers_of_up_are_used_and_survive_the_run(orchestrated, monkeypatch):
    running = {"prefect": "http://up", "mlflow": "http://models"}
    monkeypatch.setattr(prefect_api, "running_services", lambda: running)
    monkeypatch.setattr(services, "running_services", lambda: running)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    with prefect_api.orchestration() as url:
        assert (url, os.environ["PREFECT_API_URL"]) == ("http://up", "http://up/api")
        assert os.environ["MLFLOW_TRACKING_URI"] == "http://models"
    assert orchestrated == []
    assert "PREFECT_API_URL" not in os.environ
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mine")
    services.connect_mlflow()
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://mine"


def test_configured_server_is_checked_and_kept(orchestrated, monkeypatch):
    asked = []
    monkeypatch.setenv("PREFECT_API_URL", "http://theirs/api")
    monkeypatch.setattr("tasks.orchestration.reachable.check_prefect", lambda patience_s, say: asked.append(patience_s))
    with prefect_api.orchestration() as url:
        assert url == "http://theirs"
    assert (len(asked), orchestrated) == (1, [])
    assert os.environ["PREFECT_API_URL"] == "http://theirs/api"
