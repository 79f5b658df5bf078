"""A coordinator that was killed while it started ended the training, and the message quoted an older session's log.

The same held for parameter servers, and for the servers of `starling up` and of a run.
"""

import sys
import threading

import pytest

from flows.servers import services
from flows.servers.services import ServiceError, free_port, spawn
from flows.servers.supervisor import Supervisor
from training.processes.children import end_of_log, log_size
from training.processes.exit_reason import CANNOT_WORK
from training.processes.supervision import STARTS, ManagedProcess, SupervisorError

SERVER = """
import json, os, signal, sys, time
from training.processes.identity import ProcessIdentity
note, count, deaths, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
with open(count, "a") as file:
    file.write("x")
starts = len(open(count).read())
print(f"this is start {starts}", flush=True)
if starts <= deaths:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))
with open(note + ".new", "w") as file:
    json.dump({"address": "127.0.0.1:7000", **vars(ProcessIdentity.of(os.getpid()))}, file)
os.replace(note + ".new", note)
time.sleep(600)
"""


@pytest.fixture
def failing_server(tmp_path):
    """Makes a server that dies a given number of times during its start, and its address file; it has an old log."""
    begun = []

    def make(deaths, how="killed"):
        files = [tmp_path / name for name in ("note.json", "count")]
        log = tmp_path / "store.log"
        log.write_text("Traceback of an older session\n")
        command = [sys.executable, "-c", SERVER, *map(str, files), str(deaths), how]
        begun.append(ManagedProcess("store", command, log, restarts=20))
        begun[0].start()
        return begun[0], files[0]

    yield make
    for server in begun:
        server.process.kill()
        server.process.wait()


def starts(note):
    return len(note.with_name("count").read_text())


@pytest.mark.parametrize("how", ["killed", "1"])
def test_server_that_dies_during_start_is_restarted(failing_server, how):
    server, note = failing_server(STARTS - 1, how)
    assert server.address(note) == "127.0.0.1:7000"
    assert starts(note) == STARTS


def test_server_that_always_dies_is_reported_with_its_last_log(failing_server):
    server, note = failing_server(1000)
    with pytest.raises(SupervisorError, match=f"store ended with status -9 at each of {STARTS} starts") as caught:
        server.address(note)
    assert starts(note) == STARTS
    assert str(caught.value).splitlines()[1:] == [f"this is start {STARTS}"]


def test_misconfigured_server_is_not_restarted(failing_server):
    server, note = failing_server(1000, str(CANNOT_WORK))
    with pytest.raises(SupervisorError, match="store ended with status 2:\nthis is start 1$"):
        server.address(note)
    assert starts(note) == 1


def test_log_tail_excludes_earlier_sessions(tmp_path):
    log = tmp_path / "a.log"
    assert (log_size(log), end_of_log(log)) == (0, "")
    log.write_text("old\n")
    begin = log_size(log)
    assert end_of_log(log, begin) == ""
    with log.open("a") as file:
        file.write("".join(f"line {number}\n" for number in range(30)))
    assert end_of_log(log, begin, lines=40).splitlines()[0] == "line 0"
    assert end_of_log(log, begin, lines=2).splitlines() == ["line 28", "line 29"]


HEALTHY = """
import sys
from http.server import *
with open(sys.argv[1], "a") as file:
    file.write("x")
starts = len(open(sys.argv[1]).read())
if starts <= int(sys.argv[2]):
    sys.exit(f"start {starts} fails")
class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
"""


@pytest.fixture
def failing_service(home, tmp_path):
    """Makes a function that starts a server which dies a given number of times before it answers."""

    def make(deaths):
        url = f"http://127.0.0.1:{free_port()}"
        words = [str(tmp_path / "count"), str(deaths), url.rpartition(":")[2]]
        return lambda: spawn("server", [sys.executable, "-c", HEALTHY, *words], url, url)

    return make


@pytest.fixture
def quick_supervisor(monkeypatch):
    """A supervisor whose pauses are short."""
    monkeypatch.setattr("flows.servers.supervisor._FIRST_PAUSE_S", 0.01)
    supervisor = Supervisor(8)
    yield supervisor
    supervisor.stop()


def test_awaited_servers_are_restarted(quick_supervisor, failing_service):
    quick_supervisor.add(failing_service(services.STARTS - 1))
    quick_supervisor.add(lambda: spawn("worker", [sys.executable, "-c", "import time; time.sleep(600)"], "", ""))
    quick_supervisor.wait()
    assert services.answers(quick_supervisor.services[0].health)


def test_awaited_servers_have_a_lower_restart_limit(quick_supervisor, failing_service):
    """While they run they may die eight times; during the start a user waits, and the limit is lower."""
    quick_supervisor.add(failing_service(1000))
    with pytest.raises(ServiceError, match=f"server ended by itself {services.STARTS} times(?s:.)* fails$"):
        quick_supervisor.wait()


def test_waiting_ends_on_request_or_timeout(quick_supervisor):
    quick_supervisor.add(
        lambda: spawn("mute", [sys.executable, "-c", "import time; time.sleep(600)"], "", "http://127.0.0.1:1")
    )
    with pytest.raises(ServiceError, match=r"mute did not answer at http://127\.0\.0\.1:1 in 0 s"):
        quick_supervisor.wait(patience_s=0.1)
    stop = threading.Event()
    stop.set()
    quick_supervisor.wait(stop=stop)
