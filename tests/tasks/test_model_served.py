"""The registered model behind MLflow's own server, and in an environment without Starling.

The model is untrained: its accuracy does not matter here.
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

import mlflow
import pytest
from support import environment, tiny_document, write_tone

from flows.servers.services import answers, free_port
from recognition.bundle import BundleSpec, save_bundle
from speech.decoding import DECODERS
from speech.features import LogMelConfig
from speech.models import ConformerConfig
from speech.tokens import TokenConfig, train_tokenizer
from tasks.config.pipeline import parse_config
from tasks.stages import register
from tasks.stages.base import Run
from tasks.tracking.registry import CHAMPION
from tasks.tracking.runs import client, experiment_id

pytestmark = [pytest.mark.slow]
PREDICT = """
import importlib.util, sys
import mlflow
ROOMS = ("flows", "tasks", "training", "recognition", "storage", "speech", "devices", "prefect")
assert not [name for name in ROOMS if importlib.util.find_spec(name)]
mlflow.set_tracking_uri(sys.argv[1])
print(mlflow.pyfunc.load_model(sys.argv[2]).predict(sys.argv[3]).to_json(orient="records"))
"""


def untrained(folder, tokens="words", decode="greedy"):
    """A bundle with random weights."""
    texts = ["one two three four", "five six seven eight nine"]
    spec = BundleSpec(
        sample_rate=8000,
        features=LogMelConfig(num_mels=16, cmvn="none"),
        stats=None,
        tokenizer=train_tokenizer(TokenConfig(kind=tokens, vocab_size=32), texts).to_dict(),
        model=ConformerConfig(dim=16, layers=1, heads=2, kernel=5, channels=4),
        decode=DECODERS[decode](),
    )
    save_bundle(folder, spec, dict(spec.build_model().state_dict()))
    return folder


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """Address of a registry whose champion was logged as the stage register does."""
    folder = tmp_path_factory.mktemp("registry")
    bundle = untrained(folder / "bundle", "bpe", "beam")  # everything that a model may need
    with environment(STARLING_HOME=folder / "home", MLFLOW_TRACKING_URI=None):
        api, run = client(), Run(parse_config(tiny_document()), "untrained")
        made = api.create_run(experiment_id(api, "tiny"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(register, "_last_step", lambda run: 0)  # it was not trained
            version = register._log_model(run, made.info.run_id, bundle, {}, {"name": "tiny"})
        api.set_registered_model_alias("tiny", CHAMPION, version)
        yield f"sqlite:///{folder}/home/mlflow/mlflow.db"


def post(url, value, timeout=60):
    request = urllib.request.Request(url, json.dumps(value).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.timeout(300)
def test_mlflow_serves_the_champion_over_http(registry, tmp_path):
    audio = write_tone(tmp_path / "a.flac", seconds=1.0)
    text = base64.b64encode(audio.read_bytes()).decode()
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", "models:/tiny@champion"]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    env = dict(os.environ) | {"MLFLOW_TRACKING_URI": registry, "MLFLOW_DISABLE_TELEMETRY": "true"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"  # MLflow starts uvicorn by its name
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 200
        while not answers(f"{url}/ping"):
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        status, answer = post(
            f"{url}/invocations", {"dataframe_split": {"columns": ["audio"], "data": [[text], [text]]}}
        )
        assert status == 200, answer
        rows = answer["predictions"]
        assert [row["seconds"] for row in rows] == [1.0, 1.0]
        assert {row["error"] for row in rows} == {""}
        status, answer = post(f"{url}/invocations", {"inputs": [text]})
        assert (status, answer["predictions"][0]["text"]) == (200, rows[0]["text"])
        status, answer = post(f"{url}/invocations", {"dataframe_split": {"columns": ["audio"], "data": [[str(audio)]]}})
        assert status == 400
        assert json.loads(answer).keys() == {"error_code", "message"}  # no trace, and not the request again
        assert json.loads(answer)["message"].startswith("a server accepts audio, not paths")
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri="models:/tiny@champion"))
        example = json.loads((folder / "serving_input_example.json").read_text())
        status, answer = post(f"{url}/invocations", example)
        assert (status, answer["predictions"][0]["seconds"]) == (200, 0.5)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        log.close()


def install(place, requirements):
    """An environment with a model's requirements and nothing else; the test is skipped where they cannot be had."""
    venv.create(place, with_pip=True)
    command = [place / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    done = subprocess.run([*command, "--requirement", requirements], capture_output=True, text=True, timeout=1500)
    if done.returncode and any(word in done.stderr for word in ("No matching distribution", "onnection")):
        pytest.skip(f"no package index here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.timeout(1800)
def test_model_predicts_in_an_environment_of_its_requirements_only(registry, tmp_path):
    folder = Path(mlflow.artifacts.download_artifacts(artifact_uri="models:/tiny@champion", dst_path=str(tmp_path)))
    place = tmp_path / "venv"
    audio = write_tone(tmp_path / "a.ogg", seconds=1.0)
    try:
        install(place, folder / "requirements.txt")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("STARLING", "PYTHON", "VIRTUAL"))}
        words = [place / "bin" / "python", "-c", PREDICT, registry, "models:/tiny@champion", str(audio)]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    finally:
        shutil.rmtree(place, ignore_errors=True)  # gigabytes
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert (rows[0]["seconds"], rows[0]["error"]) == (1.0, "")
