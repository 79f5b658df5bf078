"""A run's own Prefect server was not restarted: the run waited for it forever, logging errors of its queues."""

import os
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from support import ROOT, end_processes, processes_naming, tiny_document, wait_until, write_config

from flows.servers import prefect_api, services, supervisor
from flows.servers.services import ServiceError, answers, spawn
from storage.retries import DiskError
from training.coordinator.journal import read_journal

SERVER = """
import http.server, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(__import__("os").getpid()).encode())
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.serve_forever()
"""


@pytest.fixture
def exit_reasons(monkeypatch):
    """Reasons for which the process would have ended."""
    reasons = []
    monkeypatch.setattr(prefect_api, "end_because", lambda say: (say(), reasons.append(say)))
    return reasons


@pytest.fixture
def started_servers(home, monkeypatch, exit_reasons):
    """Running servers, tiny ones in place of Prefect's, with short pauses between starts."""
    servers = []

    def start_prefect(listener):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        words = [sys.executable, "-c", SERVER, str(listener.fileno())]
        servers.append(spawn("prefect", words, url, url, listener=listener))
        return servers[-1]

    monkeypatch.setattr(prefect_api, "start_prefect", start_prefect)
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(prefect_api, "_LOOK_S", 0.02)
    # the socket lets a request to a dead server wait; one that is only slow is asked again
    monkeypatch.setattr(services, "ANSWER_S", 0.3)
    home.mkdir()
    return servers


def ask(url):
    with urllib.request.urlopen(url, timeout=240) as reply:
        return int(reply.read())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_dead_server_is_restarted_and_requests_wait(started_servers, number):
    said = []
    with prefect_api.private_server(said.append) as url:
        first = ask(url)
        os.kill(first, number)
        started_servers[0].process.wait(240)
        assert ask(url) == started_servers[1].process.pid != first
    assert not answers(url)
    assert all(server.process.returncode is not None for server in started_servers)
    first_line, *more = [line for line in said if not line.startswith("waiting for prefect")]  # as on a busy machine
    assert first_line == "starting the Prefect server (up to a minute; --no-prefect does without)"
    assert len(more) == 1
    assert f"prefect ended with status {-number}; restarting it" in more[0]


def refused(url):
    try:
        ask(url)
    except (urllib.error.URLError, OSError) as error:
        return isinstance(getattr(error, "reason", error), ConnectionRefusedError)
    return False


def test_repeated_server_deaths_end_the_run(started_servers, exit_reasons):
    said = []
    with prefect_api.private_server(said.append) as url:
        for _ in range(prefect_api.RESTARTS + 1):
            os.kill(ask(url), signal.SIGKILL)
            started_servers[-1].process.wait(240)
        wait_until(lambda: exit_reasons)
        assert refused(url)
    assert len(started_servers) == prefect_api.RESTARTS + 1
    assert f"prefect ended by itself {prefect_api.RESTARTS + 1} times" in said[-1]
    assert "run the same command again to continue" in said[-1]


def test_full_disk_ends_the_run_at_the_first_server_death(started_servers, exit_reasons, monkeypatch):
    said = []
    with prefect_api.private_server(said.append) as url:

        def full(folder):
            raise DiskError(f"{folder}: the disk is full")

        monkeypatch.setattr(prefect_api, "check_disk", full)
        os.kill(ask(url), signal.SIGKILL)
        wait_until(lambda: exit_reasons)
    assert len(started_servers) == 1
    assert "the disk is full" in said[-1]


def test_server_that_does_not_start_is_an_error(started_servers, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SERVER", "raise SystemExit('port is cursed')")
    with pytest.raises(ServiceError, match="port is cursed"), prefect_api.private_server(lambda _: None):
        pytest.fail("it has not started")
    assert len(started_servers) == 3


GIVEN_UP = """
import sys, time
from flows.cli.common import interruptible
from flows.servers.shutdown import end_because
with interruptible():
    end_because(lambda: print("the server is gone", flush=True))
    time.sleep(600)
"""


def test_abandoned_run_ends_with_one_line_and_status_1():
    done = subprocess.run([sys.executable, "-c", GIVEN_UP], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (1, "the server is gone\n", "")


def sharding(home):
    return list(home.glob("locks/shard-*.lock"))


def training(home):
    journal = next(home.glob("work/train-*/journal.jsonl"), None)
    return journal and sum(entry["kind"] == "step" for entry in read_journal(journal)) > 5


def decoding(home):
    return list(home.glob("locks/decode-*.lock"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("phases", "number"), [((sharding, training), signal.SIGKILL), ((training, decoding), signal.SIGTERM)]
)
def test_run_continues_when_its_server_dies_twice(tmp_path, phases, number):
    home = (tmp_path / "home").resolve()
    home.mkdir()
    document = tiny_document()
    document["train"] |= {"epochs": 20}
    config, output = write_config(home / "config.json", document), home / "output.txt"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    clean |= {"STARLING_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "flows.cli.app", "run", str(config)]
    with output.open("wb") as out, subprocess.Popen(command, cwd=ROOT, env=clean, stdout=out, stderr=out) as run:
        try:
            for phase in phases:
                wait_until(lambda phase=phase: phase(home) or run.poll() is not None, 500)
                assert run.poll() is None, output.read_text()
                for pid in servers(home):
                    os.kill(pid, number)
                wait_until(lambda: not servers(home))
                wait_until(lambda: servers(home) or run.poll() is not None)
            assert run.wait(500) == 0, output.read_text()
        finally:
            run.kill()
            end_processes(processes_naming(str(home)))
    with sqlite3.connect(home / "prefect" / "prefect.db") as connection:
        assert {state for (state,) in connection.execute("select state_type from flow_run")} == {"COMPLETED"}
    said = output.read_text()
    assert said.count("restarting it") == len(phases)
    assert "EventsWorker" not in said
    assert "Traceback" not in said


def servers(home):
    """Process numbers of the Prefect servers of a data folder."""
    return [pid for pid in processes_naming(str(home)) if b"prefect_server" in read_words(pid)]


def read_words(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:  # it has ended meanwhile
        return b""
