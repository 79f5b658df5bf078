import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support import processes_naming, write_tone

from tasks import pyfunc_path
from tasks.tracking import pyfunc_model
from tasks.tracking.pyfunc_model import decoded, recordings

A, B = np.zeros(4, dtype=np.float32), np.ones(3)


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("a.wav", [str]),
        (b"RIFF", [bytes]),
        (A, [np.ndarray]),
        ([A, B], [np.ndarray, np.ndarray]),
        ([0.0, 0.5, 1], [np.ndarray]),
        ([np.float32(0.0), np.float32(1.0)], [np.ndarray]),
        (["a.wav", b"RIFF", A], [str, bytes, np.ndarray]),
        (pd.DataFrame({"audio": ["a.wav", "b.wav"], "other": [1, 2]}), [str, str]),
        (pd.DataFrame([[[0.0, 0.1]]]), [list]),
        (pd.Series(["a.wav"]), [str]),
        (pd.Series([0.0, 0.5]), [np.ndarray]),
        ({"audio": [A]}, [np.ndarray]),
        ({"audio": "a.wav"}, [str]),
        (np.array(["a.wav", "b.wav"], dtype=object), [str, str]),
        (np.zeros((2, 5)), [np.ndarray, np.ndarray]),
        ([], []),
    ],
)
def test_recordings_are_found_in_any_input_type(given, kinds):
    items = recordings(given)
    assert [type(item) for item in items] == kinds


def test_strings_are_base64_audio_or_paths(tmp_path, monkeypatch):
    data = write_tone(tmp_path / "a.flac").read_bytes()
    text = base64.b64encode(data).decode()
    assert decoded(text) == data
    assert decoded(f"data:audio/flac;base64,{text}") == data
    assert decoded(np.array(text)) == data
    assert decoded(A) is A
    for path in ("a.wav", "/recordings/a", "x" * 24, str(tmp_path / "a.flac")):
        assert decoded(path) == path
    there = tmp_path / ("a" * 64)  # all of its characters are valid base64
    there.write_bytes(data)
    monkeypatch.chdir(tmp_path)
    assert decoded(there.name) == there.name
    monkeypatch.setitem(sys.modules, pyfunc_model._SERVER, sys)
    assert decoded(text) == data
    with pytest.raises(ValueError, match="a server accepts audio, not paths"):
        decoded("/etc/passwd")
    with pytest.raises(ValueError, match="not paths"):
        decoded(there.name)


def test_arrays_truncated_by_mlflow_are_refused():
    with pytest.raises(ValueError, match="column 'audio'"):
        recordings(pd.DataFrame([A, A]).iloc[:, :1])
    samples = pd.DataFrame(np.zeros(800))
    assert [len(item) for item in recordings(samples)] == [800]


def test_model_code_imports_neither_tasks_nor_flows():
    assert "import tasks" not in pyfunc_path().read_text()
    assert "from tasks" not in pyfunc_path().read_text()


FRESH = """
import base64, importlib.util, json, os, pickle, sys
# as if Starling were not installed: its packages can only come from the model
sys.path = [place for place in sys.path if place and not os.path.isdir(os.path.join(place, "tasks", "stages"))]
ROOMS = ("flows", "tasks", "training", "recognition", "storage", "speech", "devices")
assert not [name for name in ROOMS if importlib.util.find_spec(name)]
loads = []
def watch(event, args):
    if event == "pickle.find_class":
        loads.append(str(args))
import mlflow
import numpy as np
import pandas as pd
import soundfile
sys.addaudithook(watch)
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
path = sys.argv[3]
wave, rate = soundfile.read(path, dtype="float32")
found = {
    "path": model.predict(path),
    "bytes": model.predict(open(path, "rb").read()),
    "array": model.predict(wave, params={"sample_rate": rate}),
    "list of samples": model.predict(wave.tolist(), params={"sample_rate": rate}),
    "several": model.predict([path, path]),
    "arrays": model.predict(pd.DataFrame({"audio": [wave, wave[:4000]]}), params={"sample_rate": rate}),
    "table": model.predict(pd.DataFrame({"audio": [path]})),
    "base64": model.predict(pd.DataFrame({"audio": [base64.b64encode(open(path, "rb").read()).decode()]})),
    "missing": model.predict("/nowhere.wav"),
}
try:
    model.predict([wave, wave[:4000]], params={"sample_rate": rate})
except Exception as error:
    refused = str(error)
rooms = sorted({name.split(".")[0] for name in sys.modules} & {"flows", "tasks", "training", "prefect"})
where = [sys.modules[name].__file__ for name in ("recognition", "speech", "storage", "devices", "configurable")]
found = {k: v.to_dict("records") for k, v in found.items()}
silero = "silero_vad" in sys.modules
print(json.dumps(dict(found=found, rooms=rooms, pickles=loads, refused=refused, where=where, silero=silero)))
"""


@pytest.mark.slow
def test_champion_transcribes_in_a_new_process_without_run_data(finished, tmp_path):
    home = Path(os.environ["STARLING_HOME"])
    audio = write_tone(tmp_path / "a.flac", rate=16000, seconds=1.0)
    hidden = ["objects", "corpora", "work", "cache"]
    there = [name for name in hidden if (home / name).exists()]
    for name in there:
        (home / name).rename(home / f"{name}.away")
    try:
        command = [
            sys.executable,
            "-c",
            FRESH,
            f"sqlite:///{home}/mlflow/mlflow.db",
            "models:/tiny@champion",
            str(audio),
        ]
        env = {k: v for k, v in os.environ.items() if k not in ("STARLING_HOME", "PYTHONPATH")}
        env |= {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    finally:
        for name in there:
            (home / f"{name}.away").rename(home / name)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    answers = answer["found"]
    by_path = answers["path"][0]
    assert set(by_path) == {"text", "seconds", "confidence", "error"}
    assert (by_path["seconds"], by_path["error"]) == (1.0, "")
    assert [Path(file).parts[-3:-1] for file in answer["where"]] == [
        ("code", room) for room in ("recognition", "speech", "storage", "devices", "configurable")
    ]
    for kind in ("bytes", "base64", "array", "list of samples", "table"):
        assert [row["text"] for row in answers[kind]] == [by_path["text"]], kind
        assert answers[kind][0]["seconds"] == 1.0
    assert [row["seconds"] for row in answers["several"]] == [1.0, 1.0]
    assert [row["seconds"] for row in answers["arrays"]] == [1.0, 0.25]
    assert "nowhere.wav" in answers["missing"][0]["error"]
    assert "in each row of its column 'audio'" in answer["refused"]
    assert answer["rooms"] == []
    assert answer["silero"]
    assert [name for name in answer["pickles"] if "starling" in name or "torch" in name] == []
    assert processes_naming(str(audio)) == []
