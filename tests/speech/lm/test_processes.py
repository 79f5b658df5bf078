"""Work in processes: ordered results, clear errors, and no process that outlives its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import wait_until

from speech.lm.processes import in_processes

ROOT = Path(__file__).resolve().parents[3]
ORPHANS = """
import time
from speech.lm.processes import in_processes
if __name__ == "__main__":
    list(in_processes(time.sleep, [(600,), (600,)], 2))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_errors_reach_the_caller(workers):
    assert list(in_processes(divmod, [(number, 3) for number in range(20)], workers)) == [
        divmod(number, 3) for number in range(20)
    ]
    with pytest.raises(ZeroDivisionError):
        list(in_processes(divmod, [(1, 1), (1, 0)], workers))


def test_killed_process_is_an_error_with_a_remedy():
    with pytest.raises(RuntimeError, match="fewer workers"):
        list(in_processes(os._exit, [(9,), (9,)], 2))


def test_workers_end_with_a_killed_parent(tmp_path):
    (tmp_path / "orphans.py").write_text(ORPHANS)
    parent = subprocess.Popen([sys.executable, tmp_path / "orphans.py"], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        family = psutil.Process(parent.pid)

        def workers():
            children = family.children(recursive=True)
            spawned = [process for process in children if "spawn_main" in " ".join(process.cmdline())]
            return children if len(spawned) == 2 else None

        begun = wait_until(workers)
        parent.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(begun, timeout=240)
        assert not alive
    finally:
        parent.kill()
        parent.wait()
