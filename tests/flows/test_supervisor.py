"""Processes that die are restarted, with growing pauses and a limit; on request they end in order."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, wait_until

from flows.servers import services
from flows.servers.local_runs import end_runs
from flows.servers.services import ServiceError, answers, free_port, spawn
from flows.servers.supervisor import Supervisor
from training.processes.children import children

SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def kill(service):
    service.process.kill()
    service.process.wait(240)


def test_dead_process_is_restarted_after_a_pause(home, clock):
    said = []
    keeper = Supervisor(3, say=said.append, clock=clock)
    first = keeper.add(lambda: spawn("sleeper", SLEEP, "", ""))
    keeper.check()
    assert keeper.services == [first]
    kill(first)
    keeper.check()
    keeper.check()
    assert keeper.services == [first]
    clock.now = 1.0
    keeper.check()
    second = keeper.services[0]
    assert second.process.poll() is None
    assert second is not first
    assert "restarting it in 1 s" in said[0]
    assert first.log.with_name("sleeper.log.1").exists()
    kill(second)
    keeper.check()
    assert "in 2 s" in said[1]
    keeper.stop()


def test_frequent_deaths_are_fatal_but_old_ones_are_forgotten(home, clock):
    keeper = Supervisor(1, window_s=100, clock=clock)
    keeper.add(lambda: spawn("sleeper", SLEEP, "", ""))
    for clock.now in (0.0, 200.0):
        kill(keeper.services[0])
        keeper.check()
        clock.now += 50.0
        keeper.check()
    kill(keeper.services[0])
    with pytest.raises(ServiceError, match=r"sleeper ended by itself 2 times in 100 s; its log is .*sleeper\.log"):
        keeper.check()


def test_first_death_is_fatal_without_restarts(home):
    keeper = Supervisor()
    kill(keeper.add(lambda: spawn("sleeper", SLEEP, "", "")))
    with pytest.raises(ServiceError, match=r"sleeper ended by itself; its log is"):
        keeper.check()


def test_long_waits_are_told_with_the_seconds_waited(home, clock, monkeypatch):
    said = []
    keeper = Supervisor(say=said.append, clock=clock)
    for name, url in (("prefect", "http://one"), ("mlflow", "http://two")):
        keeper.add(lambda name=name, url=url: spawn(name, SLEEP, url, url))

    def sleep(_):
        clock.now += 1.0

    with monkeypatch.context() as patch:
        patch.setattr(services, "answers", lambda url: clock.now > (30.0 if url == "http://two" else 15.0))
        patch.setattr("time.sleep", sleep)
        keeper.wait(100.0)
    keeper.stop()
    assert said == ["waiting for prefect and mlflow (10 s)", "waiting for mlflow (20 s)", "waiting for mlflow (30 s)"]


def test_services_are_stopped_together_before_their_dependencies(home, monkeypatch):
    ended = []
    keeper = Supervisor()
    for name in ("database", "server", "worker"):
        service = keeper.add(lambda name=name: spawn(name, SLEEP, "", ""))
        for what in ("ask_to_end", "see_end"):
            done = getattr(service, what)
            note = lambda *given, name=name, what=what, done=done: (ended.append((what, name)), done(*given))  # noqa: E731
            monkeypatch.setattr(service, what, note)
    keeper.stop(1)
    assert ended == [(what, name) for what in ("ask_to_end", "see_end") for name in ("worker", "server")]
    keeper.stop()
    assert ended[4:] == [("ask_to_end", "database"), ("see_end", "database")]


def test_service_that_does_not_end_in_time_is_killed(home):
    keeper = Supervisor()
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
    )
    service = keeper.add(lambda: spawn("stubborn", [sys.executable, "-c", stubborn], "", ""))
    wait_until(lambda: "up" in service.log.read_text())
    keeper.stop(patience_s=0.1)
    assert service.process.returncode == -signal.SIGKILL


WORKER = """
import subprocess, sys
flow = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import time; time.sleep(100)']))"
child = subprocess.Popen([sys.executable, "-c", flow])
child.wait()
"""


def test_flows_of_workers_are_signalled_but_not_their_children(home):
    """A flow asks its training for a last checkpoint, for which all its processes are needed."""
    worker = spawn("worker", [sys.executable, "-c", WORKER], "", "")
    try:
        wait_until(lambda: len(children(worker.process.pid, all_generations=True)) == 2)
        flow, training = children(worker.process.pid, all_generations=True)
        end_runs([worker], 240)
        worker.process.wait(240)
        assert not Path(f"/proc/{flow}").exists()
        assert Path(f"/proc/{training}").exists()
    finally:
        os.kill(training, signal.SIGKILL)
        worker.stop(1.0)


POLITE = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(100)
"""


def test_service_is_ended_by_its_configured_signal(home):
    service = spawn("polite", [sys.executable, "-c", POLITE], "", "", end=signal.SIGINT)
    wait_until(lambda: "up" in service.log.read_text())
    service.stop(240)
    assert service.process.returncode == 7


def test_port_answers_when_something_listens():
    port = free_port()
    assert not answers(f"tcp://127.0.0.1:{port}")
    assert not answers("tcp://127.0.0.1:x")
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); s.accept(); s.accept()"
    with subprocess.Popen([sys.executable, "-c", code, str(port)]) as listener:
        wait_until(lambda: answers(f"tcp://127.0.0.1:{port}"))
        listener.kill()


ADOPTER = """
import subprocess, sys, time
from flows.servers.services import spawn
from flows.servers.supervisor import Supervisor
from training.processes.children import adopt_orphans, children
adopt_orphans()
keeper = Supervisor()
kept = keeper.add(lambda: spawn("sleeper", [sys.executable, "-c", "import time; time.sleep(100)"], "", ""))
subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '0'])"])
for _ in range(1000):
    keeper.reap()
    if children() == [kept.process.pid]:
        print("only the kept one is left")
        break
    time.sleep(0.01)
keeper.stop()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt")
def test_ended_adopted_children_are_reaped(home):
    done = subprocess.run([sys.executable, "-c", ADOPTER], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout == "only the kept one is left\n", done.stderr
