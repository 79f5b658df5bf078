"""`make setup` says what it does, step by step, since pip is silent for minutes."""

import os
import shutil
import subprocess
from pathlib import Path

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
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    said = [line.partition("(")[0].strip() for line in lines]
    assert said[0].startswith("1 of 4: an environment in ")
    assert said[1] == "2 of 4: torch with its CUDA libraries"
    assert said[2].endswith("torch torchaudio")
    assert said[3] == "3 of 4: Starling and all other packages"
    assert said[4].endswith("--editable .[dev]")
    assert said[5].startswith("4 of 4: the search for lists of hypotheses is compiled")
    assert said[6].startswith("python -c from speech.hmm.lattice import compile_search")
    assert said[7].startswith("installed; ")
    assert all(line.startswith("python -m pip install ") for line in (said[2], said[4]))


PIP = """
WARNING: Location 'file:///packages/torch/' is ignored: it is neither a file nor a directory.
Looking in indexes: https://somewhere/simple
Collecting torch
  Downloading https://somewhere/torch-2.11.0-cp311-cp311-linux_x86_64.whl.metadata (26 kB)
Requirement already satisfied: numpy in /usr/lib
  Preparing metadata (pyproject.toml): started
Downloading https://somewhere/torch-2.11.0-cp311-cp311-linux_x86_64.whl (902.1 MB)
Using cached filelock-3.1-py3-none-any.whl (12 kB)
Processing /packages/six-1.17.0-py2.py3-none-any.whl
Installing collected packages: filelock, torch
ERROR: it's 100% full\\n: C:\\x
Successfully installed filelock-3.1 torch-2.11.0
"""


@pytest.mark.parametrize("status", [0, 2])
def test_packages_are_listed_without_warnings_and_errors_end_the_installation(tmp_path, status):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "pip.txt").write_text(PIP.lstrip())
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] || exit 0\ncat {tmp_path}/pip.txt\nexit {status}\n')
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "setup", f"VENV={tmp_path / 'venv'}", "PYTHON=true"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (result.returncode != 0) == (status != 0)
    assert result.stdout.splitlines()[2:7] == [
        "  torch-2.11.0-cp311-cp311-linux_x86_64.whl (902.1 MB)",
        "  filelock-3.1-py3-none-any.whl (12 kB)",
        "  six-1.17.0-py2.py3-none-any.whl",
        "  unpacking all of them",
        r"ERROR: it's 100% full\n: C:\x",
    ]
    assert ("installed; " in result.stdout) == (status == 0)
    assert (tmp_path / "venv" / ".installed").exists() == (status == 0)


def interpreter(version):
    """A Python of some version: on the PATH, or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        # pyenv's shims are on the PATH even where the version is not selected
        if path and subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return str(path)
    return pytest.skip(f"there is no Python {version}: install it, for example with pyenv")


def environment(folder, version):
    """The Python of a new environment."""
    subprocess.run([interpreter(version), "-m", "venv", str(folder)], check=True)
    return str(folder / "bin" / "python")


def source(folder):
    """What pip needs to know the requirements; it writes beside them."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "starling"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        path = ROOT / name
        shutil.copytree(path, folder / name, symlinks=True) if path.is_dir() else shutil.copy(path, folder / name)
    return f"{folder}[dev]"


@pytest.mark.slow
@pytest.mark.real_interpreter
@pytest.mark.timeout(1800)  # pip fetches wheels of a gigabyte to read their names and versions
def test_pinned_packages_have_builds_for_the_other_version_of_python(tmp_path):
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    # these are of no version of Python, and most of what would be fetched
    wanted = [pin for pin in pins if not pin.startswith(("#", "nvidia-", "cuda-"))]
    (tmp_path / "wanted.txt").write_text("\n".join(wanted))
    pip = [environment(tmp_path / "venv", "3.12"), "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet"]
    # docopt has no wheel, and needs no compiler
    pip += ["--only-binary", ":all:", "--no-binary", "docopt", "--disable-pip-version-check"]
    result = subprocess.run([*pip, "-r", str(tmp_path / "wanted.txt")], capture_output=True, text=True, check=False)
    if "(from versions: none)" in result.stderr:
        pytest.skip("the package index cannot be reached")
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.real_interpreter
def test_python_without_a_wheel_of_a_decoder_is_refused_at_once(tmp_path):
    python = environment(tmp_path / "venv", "3.13")
    pip = [python, "-m", "pip", "install", "--no-deps", "--dry-run", "--disable-pip-version-check"]
    result = subprocess.run([*pip, source(tmp_path / "source")], capture_output=True, text=True, check=False)
    assert "requires a different Python" in result.stderr
    made = subprocess.run(["make", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'unused'}"], cwd=ROOT, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert "Starling needs Python 3.11 or 3.12, this is 3.13" in made.stderr
    assert not (tmp_path / "unused").exists()
