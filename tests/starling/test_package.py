"""The public package: light to import, with the version, the command and the example configurations."""

import importlib.metadata
import subprocess
import sys
import tomllib

import pytest
from support import ROOT

import starling

ROOMS = ("flows", "tasks", "training", "recognition", "speech", "storage", "devices")
HEAVY = ("torch", "prefect", "mlflow", "typer", "pydantic", *ROOMS)


@pytest.mark.real_interpreter
def test_importing_the_package_imports_no_heavy_library():
    script = f"import sys, starling; print(sorted(set({HEAVY!r}) & {{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]", done.stderr


def test_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "starling.__version__"}
    assert starling.__version__ == importlib.metadata.version("starling")


def test_the_changelog_has_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {starling.__version__} " in text


@pytest.mark.real_interpreter
def test_package_runs_as_the_command():
    command = [sys.executable, "-m", "starling", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, f"starling {starling.__version__}\n"), done.stderr


def test_package_data_has_every_configuration_and_py_typed():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folder = ROOT / "starling"
    names = {path.name for pattern in packaged["package-data"]["starling"] for path in folder.glob(pattern)}
    assert names == {"py.typed", *(path.name for path in (ROOT / "configs").iterdir())}
    assert "starling" in packaged["packages"]["find"]["include"]
