"""Which libraries commands and the processes of a training import, which is most of their start: a table for each.

A table only shrinks. Another library is a mistake: import it in the function that needs it, annotate types under
TYPE_CHECKING, or use `configurable.lazy`. Remove a library that is no longer imported.
"""

import json
import subprocess
import sys

import pytest
import soundfile
from support import ROOT, give_mlflow, tiny_bundle, tone

COMMANDS = {
    "--version": "",
    "corpus list": "",
    "corpus inspect CORPUS": "pyarrow",
    "init CORPUS -o NEW.yaml": "pyarrow",
    "config check demo": "pyarrow",
    "config show demo": "pyarrow",
    "storage gc": "pyarrow",
    "score TEXT TEXT": "",
    "models": "mlflow pandas pyarrow scipy sqlalchemy",
    "transcribe AUDIO --model BUNDLE --vad energy": "pyarrow torch",
}
PROCESSES = {
    "-m training.coordinator.server": "",
    "-m training.exchange.daemon": "",
    "-m training.node.agent": "",
    "-m training.node.run_rank": "pyarrow torch",
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Exit status and libraries of each command and process."""
    folder = tmp_path_factory.mktemp("starts")
    corpus, bundle, home = folder / "corpus", folder / "bundle", folder / "home"
    corpus.mkdir()
    for number in range(10):
        soundfile.write(corpus / f"{number}.wav", tone(0.5, 8000, seed=number), 8000)
        (corpus / f"{number}.txt").write_text("one two\n", encoding="utf-8")
    tiny_bundle(bundle)
    give_mlflow(home)
    places = {"CORPUS": corpus, "TEXT": corpus / "0.txt", "AUDIO": corpus / "0.wav", "BUNDLE": bundle}
    places["NEW.yaml"] = folder / "new.yaml"
    entries = {line: [str(places.get(word, word)) for word in line.split()] for line in COMMANDS | PROCESSES}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("STARLING_HOME", str(home))
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        command = [sys.executable, str(ROOT / "tests" / "starting_commands.py")]
        patched.setenv("PYTHONPATH", str(ROOT))
        done = subprocess.run(command, input=json.dumps(entries), cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (status, libraries) for name, status, libraries in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(("line", "libraries"), (COMMANDS | PROCESSES).items())
def test_start_imports_the_libraries_of_the_table_only(loaded, line, libraries):
    assert loaded[line] == (0, libraries)
