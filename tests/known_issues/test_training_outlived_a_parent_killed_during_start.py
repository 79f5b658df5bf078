"""A training whose parent was killed during the child's first seconds (imports) continued as an orphan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_interpreter


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends a child with its parent")
def test_child_detects_that_its_parent_has_changed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    child = subprocess.run(
        [sys.executable, "-m", "training.launch.supervisor", str(tmp_path / "job.json"), str(dead.pid)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 1
    assert child.stderr.strip() == "the parent died before this process started"
