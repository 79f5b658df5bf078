"""A script that ran a pipeline without `if __name__ == "__main__":` waited forever.

New processes import the script that starts them. Each of its workers ran the pipeline again, and waited for the lock of
the output that the script's own process was making, and that process waited for its workers.
"""

import multiprocessing
import os
import subprocess
import sys

import pytest
from support import ROOT, small_corpus

from devices.worker_processes import refuse_import_by_workers

SCRIPT = """
from starling import parse_config, run_pipeline

document = {
    "name": "s",
    "data": {"sources": [{"kind": "table", "path": "CORPUS"}], "sample_rate": 8000},
    "runner": {"kind": "processes", "workers": 1},
}
"""
CALL = 'print(run_pipeline(parse_config(document), until="shard")["stages"][-1]["counts"])'


def ran(folder, text):
    (folder / "script.py").write_text(text.replace("CORPUS", str(folder / "corpus" / "metadata.csv")), encoding="utf-8")
    env = os.environ | {"STARLING_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder, check=False)


@pytest.mark.slow
def test_error_recommends_the_main_guard_and_the_guard_helps(tmp_path):
    small_corpus(tmp_path / "corpus")
    failed = ran(tmp_path, SCRIPT + CALL + "\n")
    assert failed.returncode != 0
    assert 'put its calls below `if __name__ == "__main__":`' in failed.stderr
    done = ran(tmp_path, f'{SCRIPT}\nif __name__ == "__main__":\n    {CALL}\n')
    assert done.returncode == 0, done.stderr
    assert "'written': 12" in done.stdout


@pytest.mark.parametrize("inheriting", [True, False])
def test_only_imports_by_spawned_processes_are_refused(monkeypatch, inheriting):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", inheriting, raising=False)
    if inheriting:
        with pytest.raises(RuntimeError, match="starts processes, which import it"):
            refuse_import_by_workers()
    else:
        refuse_import_by_workers()
