"""The wheel that `python -m build` makes works outside the checkout.

It is installed into a new environment that sees this one's packages, whose installation takes minutes, but not its
Starling.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv

import pytest
from support import ROOT

import starling

pytestmark = [pytest.mark.slow, pytest.mark.real_interpreter]

RING = textwrap.dedent(
    """
    import sys
    import torch
    import starling
    from starling import Ring

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Ring(model, optimizer, folder=sys.argv[1]) as ring:
        for _, _, rows in ring.leases([4, 4]):
            optimizer.zero_grad()
            model(torch.ones(len(rows), 2)).square().sum().backward()
            optimizer.step()
    print(ring.steps > 0, starling.__file__)
    """
)


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def copy_checkout(source):
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "docs", "tests")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)


def make_environment(place):
    """An environment in `place` with this one's packages, but not its Starling; returns its Python."""
    venv.create(place / "venv", with_pip=False)
    packages = [folder for folder in sys.path if folder.endswith("site-packages")]
    scheme = sysconfig.get_paths(vars={"base": str(place / "venv"), "platbase": str(place / "venv")})
    (place / "venv" / scheme["purelib"] / "packages.pth").write_text("\n".join(packages))
    return str(place / "venv" / "bin" / "python")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of an environment with the wheel, and that of a copy of the checkout with what was built."""
    pytest.importorskip("build", reason="the package build is not installed: make setup")
    source, place = tmp_path_factory.mktemp("wheel") / "source", tmp_path_factory.mktemp("installed")
    copy_checkout(source)
    run(sys.executable, "-m", "build", str(source), cwd=place)  # in `source`, the package would be found there
    (wheel,) = (source / "dist").glob("*.whl")
    python = make_environment(place)
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel), cwd=place)
    return place, source


def test_a_script_beside_a_clone_named_starling_finds_its_editable_installation(tmp_path):
    copy_checkout(tmp_path / "starling")
    python, script = make_environment(tmp_path), tmp_path / "script.py"
    run(python, "-m", "pip", "install", "--no-deps", "--quiet", "--editable", str(tmp_path / "starling"), cwd=tmp_path)
    script.write_text("from starling import Ring\nimport starling\nprint(starling.__file__)\n")
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    place = run(python, str(script), cwd=tmp_path, env=kept)
    assert place.strip() == str(tmp_path / "starling" / "starling" / "__init__.py")


@pytest.fixture
def environment(installed, tmp_path):
    """Variables of processes that use the wheel."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"STARLING_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}


def test_installed_command_prints_its_version(installed, environment):
    command = str(installed[0] / "venv" / "bin" / "starling")
    assert run(command, "--version", cwd=installed[0], env=environment) == f"starling {starling.__version__}\n"


def test_installed_wheel_shards_the_demo(installed, environment, tmp_path):
    pytest.importorskip("espeakng_loader")
    command = str(installed[0] / "venv" / "bin" / "starling")
    words = ("run", "demo", "--until", "shard", "--no-prefect", "--json")
    *_, shard = json.loads(run(command, *words, cwd=tmp_path, env=environment))["stages"]
    assert (shard["name"], shard["counts"]["shards"]) == ("shard", 8)
    assert list((tmp_path / "home").rglob("index.parquet"))


def test_installed_wheel_trains_a_ring(installed, environment, tmp_path):
    python = str(installed[0] / "venv" / "bin" / "python")
    out = run(python, "-c", RING, str(tmp_path / "ring"), cwd=tmp_path, env=environment)
    trained, _, file = out.strip().partition(" ")
    assert trained == "True"
    assert file.startswith(str(installed[0] / "venv"))


def test_the_wheel_has_every_room_configuration_and_template(installed):
    (place,) = (installed[0] / "venv" / "lib").glob("python*/site-packages")
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks"}
    assert all((place / room / "__init__.py").is_file() for room in rooms)
    for packaged, folder in (("starling/configs", "configs"), ("tasks/templates", "tasks/templates")):
        assert {path.name for path in (place / packaged).iterdir()} == {path.name for path in (ROOT / folder).iterdir()}
    assert (installed[1] / "dist" / f"starling-{starling.__version__}.tar.gz").is_file()  # which the wheel is made from
