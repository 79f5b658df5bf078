"""The training engine works where only the core's packages are installed, and the command says what it lacks."""

import json
import os
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from support import ROOT

pytestmark = pytest.mark.real_interpreter

SITE = """
import json, os, sys
from importlib.machinery import PathFinder

HIDDEN = set(json.loads(os.environ["HIDDEN_PACKAGES"]))


class CoreFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if path is None and name in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[:] = [CoreFinder if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""A sitecustomize.py that hides all packages but the core's, in child processes, too."""

RING = """
import sys, starling
assert "torch" not in sys.modules
assert starling.Ring and starling.RingConfig and starling.RingError
from starling import Ring
print(*sorted(sys.modules))
import training.coordinator.server
"""
"""Prints the modules that the ring needs, in an interpreter that also imports its coordinator."""

LEARNER = textwrap.dedent(
    """
    import sys
    import torch
    from starling import Ring

    torch.set_num_threads(1)
    torch.manual_seed(int(sys.argv[2]))
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with Ring(model, optimizer, folder=sys.argv[1], learners=2) as ring:
        for _, _, rows in ring.leases([25] * 8, epochs=2, batch=5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[rows]), inputs[rows].sum(1, keepdim=True)).backward()
            optimizer.step()
    print(ring.steps, *(name for name in ("recognition", "speech", "flows", "tasks", "pyarrow") if name in sys.modules))
    """
)


def core():
    """Names of the distributions that the core's dependencies bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names, waiting = {"starling"}, [Requirement(line) for line in project["dependencies"]]
    while waiting:
        requirement = waiting.pop()
        if requirement.name.lower() not in names and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            names.add(requirement.name.lower())
            waiting += [Requirement(line) for line in metadata.requires(requirement.name) or ()]
    return {name.replace("_", "-") for name in names}


@pytest.fixture(scope="module")
def hidden():
    """The packages that are not the core's: it takes seconds to ask all installed distributions."""
    names, owners = core(), metadata.packages_distributions().items()
    modules = [module for module, by in owners if not names & {name.lower().replace("_", "-") for name in by}]
    assert {"pyarrow", "torchaudio", "prefect", "mlflow", "rich"} <= set(modules)
    assert not {"torch", "zmq", "pydantic", "starling"} & set(modules)
    return modules


@pytest.fixture
def core_only(tmp_path, hidden):
    """Environment of processes that find no packages other than the core's."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return env | {"HIDDEN_PACKAGES": json.dumps(hidden)}


def test_the_ring_and_its_coordinator_need_only_the_core_packages_and_no_speech(tmp_path, core_only):
    done = subprocess.run(
        [sys.executable, "-c", RING], env=core_only, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(done.stdout.split())
    assert "training.ring.ring" in loaded
    assert not loaded & {"recognition", "speech", "flows", "tasks", "training.config"}


def test_import_of_a_pipeline_name_says_which_extra_to_install(tmp_path, core_only):
    script = "import starling; starling.load_config"
    done = subprocess.run([sys.executable, "-c", script], env=core_only, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: starling.load_config needs " in done.stderr
    assert done.stderr.rstrip().endswith(
        "which is not installed: pip install '.[pipeline]' in Starling's source folder"
    )


@pytest.mark.slow
def test_two_learners_train_with_only_the_core_packages(tmp_path, core_only):
    words = [sys.executable, "-c", LEARNER, str(tmp_path / "ring")]
    start = {"env": core_only, "cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    learners = [subprocess.Popen([*words, str(seed)], **start) for seed in range(2)]
    outs = [learner.communicate(timeout=300) for learner in learners]
    assert [learner.returncode for learner in learners] == [0, 0], outs
    assert all(int(out) > 0 for out, _ in outs), outs  # and none of the names
    lines = map(json.loads, (tmp_path / "ring" / "journal.jsonl").read_text(encoding="utf-8").splitlines())
    assert [line["utterances"] for line in lines if line["kind"] == "epoch"] == [200, 200]


def test_command_without_the_pipeline_says_which_extra_to_install(tmp_path, core_only):
    command = [sys.executable, "-m", "starling", "--version"]
    done = subprocess.run(command, env=core_only, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: the command needs the pipeline (mlflow, prefect, pyarrow, torchaudio, typer not"
    )
    assert "pip install '.[pipeline]' in Starling's source folder, or '.[demo]' for" in done.stderr
    assert "Traceback" not in done.stderr
