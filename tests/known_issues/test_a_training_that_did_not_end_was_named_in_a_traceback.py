"""If an earlier training of the same job does not end, the next one gives up: it did so with a traceback."""

import os
import subprocess
import sys

from forks import Forkable

from storage.locks import file_lock
from training.processes.exit_reason import VARIABLE, read_reason

PROGRAM = """
import os, sys
from training.launch import supervisor

supervisor.PREDECESSOR_S = 0.1
raise SystemExit(supervisor.main([sys.argv[1], str(os.getppid())]))
"""


def test_process_that_holds_the_lock_is_named(corpus, tmp_path):
    job, note = tmp_path / "job.json", tmp_path / "exit-reason.txt"
    job.write_text(corpus.job(tmp_path).model_dump_json())
    with file_lock(tmp_path / "training.lock", wait_s=0):
        ended = subprocess.run(
            [sys.executable, "-c", Forkable(PROGRAM), str(job)],
            env={**os.environ, VARIABLE: str(note)},
            capture_output=True,
            text=True,
            timeout=240,
        )
    named = f"training.lock is held by process {os.getpid()}: wait for it, or end it"
    assert ended.returncode == 1
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr
    assert named in read_reason(note)
