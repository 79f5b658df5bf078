"""The summary of `make test-gpu` reports failed and skipped tests as clearly as passed ones."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_summary
import pytest
import torch

from devices.gpus import Driver, Gpus


def report(nodeid="t.py::test", longrepr="", **properties):
    return SimpleNamespace(nodeid=nodeid, longrepr=longrepr, user_properties=list(properties.items()))


def test_summary_has_outcomes_figures_and_reasons():
    stats = {
        "passed": [report(measured="a step of 3 ms"), report(other="nothing")],
        "failed": [report("t.py::test_breaks")],
        "skipped": [report(longrepr=("t.py", 1, "Skipped: needs 2 GPU(s), this machine has 1"))] * 2,
    }
    text = gpu_summary.summary(stats, ["GPUs: 1 x H100"], "abc123")
    assert "### Commit abc123" in text
    assert text[5:] == [
        "- GPUs: 1 x H100",
        "- tests: 2 passed, 1 FAILED, 2 skipped",
        "  - FAILED: `t.py::test_breaks`",
        "  - skipped, needs 2 GPU(s), this machine has 1: 2",
        "- a step of 3 ms",
    ]
    assert "- tests: none" in gpu_summary.summary({}, [], "abc123")


def test_summary_without_a_gpu_says_that_no_test_ran(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Gpus, "driver", lambda self: Driver())
    assert gpu_summary.machine() == [gpu_summary.NONE]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(Gpus, "driver", lambda self: Driver(1, "535.104", (12, 2)))
    lines = gpu_summary.machine()
    assert lines[0] == gpu_summary.NONE
    assert "too old" in lines[1]


def test_the_machine_and_its_versions_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(Gpus, "driver", lambda self: Driver(2, "580.1", (13, 0)))
    gpus, versions = gpu_summary.machine()
    assert gpus == "GPUs: 2 x NVIDIA H100"
    assert all(word in versions for word in ("driver 580.1", "cuDNN 91900", "NCCL 2.28.9", torch.__version__))


WITHOUT = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("prefect", "mlflow", "typer", "rich"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Block())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow  # 4 s of CPU: it imports 17 test files, and what they test, in an interpreter
def test_gpu_tests_are_collected_without_prefect_and_mlflow():
    """What `make test-gpu` collects, on a machine that has torch and little else."""
    root = Path(__file__).resolve().parents[1]
    recipe = re.search(r"-m gpu \$\$\((grep [^)]*)\)", (root / "Makefile").read_text(encoding="utf-8"))
    assert recipe is not None
    words = recipe[1].replace("$$", "$")
    files = subprocess.run(["bash", "-c", words], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    assert len(files) >= 17
    options = ["-q", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider", *files]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    collection = subprocess.run(
        [sys.executable, "-c", WITHOUT, *options], cwd=root, capture_output=True, text=True, timeout=240, env=clean
    )
    assert collection.returncode == 0, collection.stdout[-3000:] + collection.stderr[-2000:]
    collected = {line.split("::")[0] for line in collection.stdout.splitlines() if "::" in line}
    assert collected == set(files)
