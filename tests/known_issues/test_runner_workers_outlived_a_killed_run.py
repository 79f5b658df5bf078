"""Worker processes of `runner.kind: processes` waited forever when the run was killed, and Ctrl-C showed a traceback
of each.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from support import ROOT, end_processes, processes_naming, wait_until

from devices.worker_processes import starting_workers, worker_pool

pytestmark = pytest.mark.real_interpreter

POOL = """
import os, signal, sys, time
from devices.worker_processes import starting_workers, worker_pool

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    pool = worker_pool(1)
    with starting_workers():
        future = pool.submit(os.getpid)
    print(future.result(), flush=True)
    time.sleep(600)
"""
STAGE = """
import signal, time
from tasks.config.pipeline import RunnerConfig
from tasks.stages.runner import map_pieces

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pieces = [{"name": "0", "store": "memory://none", "shards": [], "sample_rate": 8000}]
    runner = RunnerConfig(kind="processes", workers=1)
    for done in map_pieces(runner, "tasks.stages.shard:shard_piece", pieces, "probe"):
        print("done", flush=True)
        time.sleep(600)
"""


@pytest.fixture
def started(tmp_path):
    """Starts a program whose one worker has finished a piece; the process, and a function that lists its workers."""
    running = []

    def start(text):
        script = tmp_path / "program.py"
        script.write_text(text)
        env = os.environ | {"PYTHONPATH": str(ROOT), "STARLING_HOME": str(tmp_path)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, script], env=env, start_new_session=True, **pipes)
        running.append(process)
        assert process.stdout.readline().strip(), process.stderr.read()
        return process, lambda: [pid for pid in processes_naming(str(tmp_path)) if pid != process.pid]

    yield start
    end_processes(processes_naming(str(tmp_path)))  # workers first: those that are left hold the pipes
    for process in running:
        process.communicate()


@pytest.mark.parametrize("program", [POOL, pytest.param(STAGE, marks=pytest.mark.slow)], ids=["pool", "stage"])
def test_worker_ends_when_its_run_is_killed(started, program):
    process, workers = started(program)
    assert workers()
    process.kill()
    wait_until(lambda: not workers())


@pytest.mark.parametrize("program", [POOL, pytest.param(STAGE, marks=pytest.mark.slow)], ids=["pool", "stage"])
def test_workers_print_nothing_when_ctrl_c_ends_the_run(started, program):
    process, workers = started(program)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=240)
    wait_until(lambda: not workers())
    assert said.count("Traceback") == 1, said  # the program's own traceback: it does not handle Ctrl-C
    assert "SpawnProcess" not in said


def test_ctrl_c_does_not_interrupt_a_starting_worker():
    """It would otherwise die in the middle of its imports, with their traceback."""
    with starting_workers(), subprocess.Popen(["sleep", "600"]) as child:
        status = Path(f"/proc/{child.pid}/status").read_text()
        child.kill()
    (blocked,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    assert int(blocked, 16) & 1 << signal.SIGINT - 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


MASKED = """
import os, signal
from devices.worker_processes import starting_workers

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with starting_workers():
        os.kill(os.getpid(), signal.SIGINT)
        print("the end of the block", flush=True)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_during_worker_start_reaches_the_run_afterwards():
    done = subprocess.run([sys.executable, "-c", MASKED], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == ["the end of the block", "interrupted"], done.stderr


def test_running_worker_is_ended_by_ctrl_c():
    with worker_pool(1) as pool:
        with starting_workers():
            pid = pool.submit(os.getpid).result()
        future = pool.submit(time.sleep, 600)
        os.kill(pid, signal.SIGINT)
        with pytest.raises(BrokenProcessPool):
            future.result(240)
