"""A finished run ended with status -6 and "FATAL: exception not rethrown".

A library's thread that still computes during interpreter shutdown aborts the process; here it is torch's.
"""

import subprocess
import sys

import pytest
from support import ROOT, wait_until

pytestmark = pytest.mark.real_interpreter

THREAD = """
import atexit
import sys
import threading
import time

if sys.argv[0] in ("-m", "-c"):
    import torch

    late = threading.Event()

    done = 0

    def compute():
        global done
        values = torch.randn(100)
        late.wait()
        while True:
            values + values
            done += 1

    def wait_for_it():
        late.set()
        while done < 1000:
            time.sleep(0.01)

    threading.Thread(target=compute, daemon=True).start()
    # registered first, so called last: as late as any Python code can run
    atexit.register(wait_for_it)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(THREAD)

    def run(*words):
        env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)

    return run


@pytest.mark.parametrize(
    ("words", "status"), [(["--help"], 0), pytest.param(["no-such-command"], 2, marks=pytest.mark.slow)]
)
def test_command_keeps_its_exit_status_despite_running_threads(run, words, status):
    done = run("-m", "flows.cli.app", *words)
    assert done.returncode == status, done.stderr
    assert "terminate" not in done.stderr
    assert "Usage" in (done.stderr if status else done.stdout)


def test_running_thread_aborts_an_unprotected_process(run):
    wait_until(lambda: run("-c", "pass").returncode == -6)  # unless a busy machine lets the thread wait meanwhile


def test_training_process_keeps_its_exit_status_despite_running_threads(run):
    work = "print('done'); logging.getLogger().error('said'); exit_at_once(7)"
    done = run("-c", f"import logging; from training.processes.children import exit_at_once; {work}")
    assert (done.returncode, done.stdout, done.stderr) == (7, "done\n", "said\n")
