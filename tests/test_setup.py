"""`make setup` says what it does, step by step, since pip is silent for minutes."""

import os
import shutil
import subprocess

import pytest
from support import ROOT


def test_each_step_of_the_installation_is_announced(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "python $*"\n')
    python.chmod(0o755)
    command = ["make", "setup", f"VENV={tmp_path / 'venv'}", "PYTHON=true"]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }  # of `make test`
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    lines = found.stdout.splitlines()
    said = [line.partition("(")[0].strip() for line in lines]
    assert said[0].startswith("1 of 3: an environment in ")
    assert said[1] == "2 of 3: torch with its CUDA libraries"
    assert said[2].endswith("torch torchaudio")
    assert said[3] == "3 of 3: Starling and all other packages"
    assert said[4].endswith("--editable .[dev]")
    assert said[5].startswith("installed; ")
    assert all(one.startswith("python -m pip install --quiet ") for one in (said[2], said[4]))
