"""Ctrl-C interrupted the first worker of a process in its imports: multiprocessing's resource tracker, which starts
with it, unblocked the signal.
"""

import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.real_interpreter

PROGRAM = """
import signal
from multiprocessing import resource_tracker
from devices.worker_processes import starting_workers

with starting_workers():
    resource_tracker.ensure_running()
    print(int(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


def test_signal_stays_blocked_while_the_first_worker_starts():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout == "1\n", done.stderr
