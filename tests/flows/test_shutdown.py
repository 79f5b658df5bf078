"""A process that gets a signal ends, with all its descendants, even if its threads are busy."""

import signal
import subprocess
import sys

import psutil
import pytest
from support import ROOT, wait_until

from flows.servers import shutdown
from flows.servers.shutdown import _Handler, bounded_end
from training.processes.children import children

pytestmark = pytest.mark.real_interpreter

BUSY = """
import subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from flows.servers.shutdown import bounded_end

class Terminated(BaseException):
    pass

def terminate(*_):
    raise Terminated

import signal
signal.signal(signal.SIGTERM, terminate)  # as Prefect does in the process of a flow run
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
with bounded_end(float(sys.argv[2])), ThreadPoolExecutor(1) as pool:
    pool.submit(time.sleep, int(sys.argv[1]))
    if int(sys.argv[1]):
        print(subprocess.Popen([sys.executable, "-c", child]).pid, flush=True)
    else:
        print("0", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("busy_s", "patience_s", "status"), [(600, 0.5, 143), (0, 500, 1)])
def test_process_ends_soon_despite_busy_threads(busy_s, patience_s, status):
    command = [sys.executable, "-c", BUSY, str(busy_s), str(patience_s)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    child = int(parent.stdout.readline())
    if child:
        assert children(parent.pid, all_generations=True) == [child]
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(240) == status
    parent.stdout.close()
    if child:
        wait_until(lambda: has_ended(child))


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_previous_signal_handler_is_restored_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with bounded_end():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_our_handler_is_kept_in_nested_flows():
    """Prefect puts its own handler in place for each flow, unless it is there already."""
    from prefect.utilities import engine

    prefects = engine._prefect_sigterm_handler
    with engine.capture_sigterm(), bounded_end():
        ours = signal.getsignal(signal.SIGTERM)
        assert isinstance(ours, _Handler)
        assert ours.before is prefects
        with engine.capture_sigterm():
            assert signal.getsignal(signal.SIGTERM) is ours
            assert engine.is_prefect_sigterm_handler_installed()  # a worker that cancels the run asks for it
    assert engine._prefect_sigterm_handler is prefects


def test_nested_block_changes_nothing():
    with bounded_end():
        outer = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with bounded_end():
            assert outer == {number: signal.getsignal(number) for number in outer}
        assert outer == {number: signal.getsignal(number) for number in outer}
    assert not any(isinstance(signal.getsignal(number), _Handler) for number in outer)


TOLD = """
import sqlite3, sys, time
from flows.servers.shutdown import bounded_end, end_if_signalled

def tidy():
    try:
        print("ready", flush=True)
        time.sleep(600)
    finally:
        print("tidying", flush=True)
        time.sleep(0.3)
        print("tidied", flush=True)

class Slow:
    def __del__(self):
        time.sleep(0.1)

def finalize():
    print("ready", flush=True)
    while True:
        Slow()
        time.sleep(0.1)

def call():
    print("ready", flush=True)
    endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"
    sqlite3.connect(":memory:").execute(endless)

def thread():
    import threading
    from flows.servers import shutdown
    def fail():
        shutdown._countdown.announced.wait()
        1 / 0
    failing = threading.Thread(target=fail)
    try:
        failing.start()
        print("ready", flush=True)
        time.sleep(600)
    finally:
        failing.join()

def late():
    print("ready", flush=True)
    time.sleep(600)

def say(number):
    time.sleep(0.5 if sys.argv[1] == "late" else 0)
    print("told", int(number), flush=True)

try:
    with bounded_end(float(sys.argv[2]), say=say):
        globals()[sys.argv[1]]()
except BaseException:
    end_if_signalled()
    raise
"""


def run_with_signals(what, patience_s, *numbers):
    """Exit status, output and errors of a process that gets signals."""
    command = [sys.executable, "-c", TOLD, what, str(patience_s)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            for number in numbers:
                process.send_signal(number)
                if number is not numbers[-1]:
                    process.stdout.readline()
            out, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    return process.returncode, out.split(), errors


ENDLESS = 500
INT, TERM = signal.SIGINT, signal.SIGTERM


def test_further_signals_do_not_interrupt_the_clean_up():
    status, out, errors = run_with_signals("tidy", ENDLESS, TERM, INT, INT)
    assert (status, errors) == (128 + TERM, "")
    assert out[-1] == "tidied"
    assert out.count("told") <= 1


def test_exception_dropped_by_a_finalizer_is_raised_again():
    assert run_with_signals("finalize", ENDLESS, INT) == (128 + INT, ["told", "2"], "")


def test_call_that_blocks_signals_is_ended():
    assert run_with_signals("call", 0.5, INT) == (128 + INT, ["told", "2"], "")


def test_process_reports_the_signal_before_it_ends():
    assert run_with_signals("late", ENDLESS, INT) == (128 + INT, ["told", "2"], "")


def test_threads_failing_during_shutdown_print_nothing():
    assert run_with_signals("thread", ENDLESS, TERM) == (128 + TERM, ["told", "15"], "")


def test_output_is_flushed_before_a_hard_exit(monkeypatch):
    done = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "flush", lambda name=name: done.append(name))
    monkeypatch.setattr(shutdown, "end_hard", done.append)
    shutdown.end_if_signalled()
    assert done == []
    monkeypatch.setattr(shutdown, "shutdown_signal", lambda: signal.SIGTERM)
    shutdown.end_if_signalled()
    assert done == ["stdout", "stderr", signal.SIGTERM]
