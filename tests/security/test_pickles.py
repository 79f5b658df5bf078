"""A pickle in place of any input file: it is never executed, and each reader reports an error."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support import ROOT, copy_finished, load_beside, tiny_document

from recognition.bundle import load_bundle
from storage.index import ShardIndex
from storage.intact import DamagedObjectError
from storage.objects import ObjectStore
from storage.reading import ShardReader
from storage.stages import StageOutput
from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run
from tasks.stages.decode import DECODE
from training.coordinator.journal import read_journal

tones = load_beside(__file__, "../training/tones.py")


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path):
    place = tmp_path / "it-ran"
    yield place
    assert not place.exists(), "something was unpickled"


def pickles(marker):
    """A bare pickle, and a NumPy file of objects, which np.load would unpickle."""
    bare = pickle.dumps(Touch(marker))
    head = repr({"descr": "|O", "fortran_order": False, "shape": (1,)}).encode().ljust(117) + b"\n"
    return {"bare": bare, "numpy": b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bare}


def test_loading_the_pickle_of_these_tests_runs_code(tmp_path):
    pickle.loads(pickles(tmp_path / "ran")["bare"])
    assert (tmp_path / "ran").is_dir()


@pytest.mark.parametrize("kind", ["bare", "numpy"])
def test_pickle_in_place_of_any_file_of_a_run_is_not_loaded(tmp_path, marker, kind):
    """One after another, each file that the stages of a finished run have left; then the stages run again."""
    folder = copy_finished(tmp_path / "home")
    poison = pickles(marker)[kind]
    files = sorted(path for path in (folder / "objects").rglob("*") if path.is_file())
    assert {path.suffix for path in files} >= {".parquet", ".tar", ".json", ".safetensors", ".jsonl"}
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(poison)
        with suppress(ValueError, OSError):
            read_like_a_stage(path)
        path.write_bytes(whole)
    assert not marker.exists()


def read_like_a_stage(path):
    """Read a file with what the stages read its kind with."""
    store = ObjectStore(str(path.parent))
    if path.name == "index.parquet":
        ShardIndex.read(store)
    elif path.suffix == ".parquet":
        read_table(store, path.name)
    elif path.suffix == ".tar":
        index = ShardIndex.read(store)
        ShardReader(store, index).payload(0)
    elif path.suffix == ".safetensors" or path.name == "bundle.json":
        load_bundle(path.parent)
    elif path.suffix == ".jsonl":
        read_journal(path)
    elif path.suffix == ".json":
        store.read_json(path.name)


def test_a_stage_that_finds_a_pickle_in_place_of_its_input_stops_with_an_error(tmp_path, monkeypatch, marker):
    folder = copy_finished(tmp_path / "home")
    monkeypatch.setenv("STARLING_HOME", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = Run(parse_config(tiny_document()), "again")
    run_plainly(run, "train")
    assert all(result.cached for result in run.results.values())
    model = Path(run.result("train").url.removeprefix("file://")) / "model" / "model.safetensors"
    model.write_bytes(pickles(marker)["bare"])
    output = DECODE.output(run)
    assert isinstance(output, StageOutput)
    output.clear()
    with pytest.raises(DamagedObjectError, match=r"model\.safetensors"):
        DECODE.execute(run)
    assert not marker.exists()


def test_members_that_loaders_would_unpickle_are_refused(tmp_path, marker):
    import io
    import tarfile

    from storage.safety import UnsafeTarError, check_tar

    for suffix in ("pkl", "pickle", "pyd", "pth", "pt", "joblib", "npz", "mp", "PYD", "flac.pickle"):
        path, data = tmp_path / "x.tar", pickles(marker)["bare"]
        with tarfile.open(path, "w") as tar:
            member = tarfile.TarInfo(f"a.{suffix}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        with pytest.raises(UnsafeTarError, match="suffix"):
            check_tar(path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_pickle_in_place_of_a_checkpoint_is_not_loaded(tmp_path, marker, name):
    from training.learner.checkpoint import read_weights

    store = ObjectStore(str(tmp_path / "out"))
    for position in (f"checkpoints/000001/node-000/{name}", "replicas/epoch-0001/node-000.safetensors"):
        store.write(position, pickles(marker)["bare"])
        with pytest.raises(Exception, match=r"(?i)header|safetensor"):
            read_weights(store, position)


REGISTRY = """
import sys
from pathlib import Path
from tasks.tracking.runs import client
client()
import mlflow
try:
    mlflow.pyfunc.load_model(sys.argv[1])
except Exception as error:
    print(type(error).__name__, str(error)[:300])
else:
    print("loaded")
"""


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_registered_model_whose_code_is_replaced_by_a_pickle_is_refused(finished, tmp_path, marker):
    """MLflow would unpickle `python_model.pkl` if the model's description names it."""
    import yaml

    home = Path(os.environ["STARLING_HOME"])
    [model] = {path.parent for path in (home / "mlflow").rglob("MLmodel")}
    copied = shutil.copytree(model, tmp_path / "model")
    document = yaml.safe_load((copied / "MLmodel").read_text())
    flavour = document["flavors"]["python_function"]
    for name in ("model_code_path", "python_model"):
        flavour.pop(name, None)
    flavour |= {"python_model": "python_model.pkl", "cloudpickle_version": "3.1.1"}
    (copied / "python_model.pkl").write_bytes(pickles(marker)["bare"])
    (copied / "MLmodel").write_text(json.dumps(document, default=str))
    env = {**os.environ, "STARLING_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", REGISTRY, str(copied)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loaded" not in done.stdout
    assert "ickle" in done.stdout
