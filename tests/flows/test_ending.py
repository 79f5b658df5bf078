"""A process that is told to end does so, with all that it started, also when its threads are busy."""

import os
import signal
import subprocess
import sys

import pytest
from support import ROOT, wait_until

from flows.ending import bounded_end, descendants

BUSY = """
import subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from flows.ending import bounded_end

class Terminated(BaseException):
    pass

def terminate(*_):
    raise Terminated

import signal
signal.signal(signal.SIGTERM, terminate)  # as Prefect does in the process of a flow run
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
with bounded_end(0.5), ThreadPoolExecutor(1) as pool:
    pool.submit(time.sleep, int(sys.argv[1]))
    if int(sys.argv[1]):
        print(subprocess.Popen([sys.executable, "-c", child]).pid, flush=True)
    else:
        print("0", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("busy_s", "status"), [(600, 143), (0, 1)])
def test_a_process_ends_soon_whatever_its_threads_do(busy_s, status):
    command = [sys.executable, "-c", BUSY, str(busy_s)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    child = int(parent.stdout.readline())
    if child:
        assert descendants(parent.pid) == [child]
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == status
    parent.stdout.close()
    if child:
        wait_until(lambda: not os.path.exists(f"/proc/{child}") or b"Z" in state(child), 20)


def state(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0]


def test_what_was_done_on_the_signal_before_is_done_again_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with bounded_end():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
