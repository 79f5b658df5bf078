"""Each use of a model whose files lie elsewhere left a copy in the folder of temporary files."""

import os
import subprocess
import sys

from forks import Forkable

# stands in for a remote artifact store: MLflow copies its files to a folder that it never removes
SCRIPT = """
import sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[2]
import mlflow

def download(artifact_uri, dst_path=None):
    folder = Path(tempfile.mkdtemp()) if sys.argv[1] == "remote" else Path(tempfile.gettempdir()) / "registry"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "bundle.json").write_text("{}")
    return str(folder / "model")

mlflow.artifacts.download_artifacts = download
from tasks.tracking.fetching import download_bundle
print(download_bundle("models:/m/1"))
"""


def left_after_use(tmp_path, home, where):
    environment = os.environ | {"STARLING_HOME": str(home)}
    command = [sys.executable, "-c", Forkable(SCRIPT), where, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip().endswith("model")
    return [path.parts[len(tmp_path.parts)] for path in tmp_path.rglob("bundle.json")]


def test_copy_is_removed_and_a_registry_in_the_same_place_is_not(tmp_path, home):
    temporary = tmp_path / "temporary"
    (temporary / "registry").mkdir(parents=True)
    assert left_after_use(temporary, home, "here") == ["registry"]
    assert left_after_use(temporary, home, "remote") == ["registry"]
