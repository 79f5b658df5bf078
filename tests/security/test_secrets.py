"""Planted secrets appear nowhere: not in a run's files, output or requests, nor on its processes' command lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, small_corpus, tiny_document, write_config

PLANTED = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED00KEYID",
    "AWS_SECRET_ACCESS_KEY": "planted0secret0of0the0store",
    "AWS_SESSION_TOKEN": "planted0session0token",
    "MLFLOW_TRACKING_PASSWORD": "planted0password0of0mlflow",
    "MLFLOW_TRACKING_USERNAME": "somebody",
    "PREFECT_API_AUTH_STRING": "somebody:planted0password0of0prefect",
}
SECRET = [value for name, value in PLANTED.items() if name != "MLFLOW_TRACKING_USERNAME"]


def run(home, *words, **more):
    env = {**os.environ, **PLANTED, "STARLING_HOME": str(home), **more}
    command = [sys.executable, "-m", "flows.cli.app", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


def found_in(text):
    return [value for value in SECRET if value in text]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("failing", [False, True])
def test_run_writes_no_secret_of_its_environment(tmp_path, failing):
    """A run that succeeds, and one whose object store and MLflow refuse."""
    corpus = small_corpus(tmp_path / "corpus", speakers=6, each=3)
    document = tiny_document(data={"sources": [{"kind": "table", "path": str(corpus)}], "sample_rate": 8000})
    document["data"]["valid_share"] = 0.3
    more = {"AWS_MAX_ATTEMPTS": "1"}
    if failing:
        document["storage"]["url"] = "s3://bucket/prefix"
        more |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    home = tmp_path / "home"
    config = write_config(tmp_path / "c.yaml", document)
    done = run(home, "run", config, "--until", "shard", "--no-prefect", "--json", **more)
    assert (done.returncode == 0) is not failing, done.stderr
    assert found_in(done.stdout + done.stderr) == []
    written = [path for path in home.rglob("*") if path.is_file()]
    assert written or failing
    for path in written:
        assert found_in(path.read_bytes().decode("latin-1")) == [], path
    if not failing:
        assert json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "url", ["s3://user:planted0secret0of0the0store@bucket/x", "http://u:planted0secret0of0the0store@host/x"]
)
def test_a_url_with_a_password_is_refused_without_repeating_it(tmp_path, url):
    from storage.objects import ObjectNameError, ObjectStore
    from tasks.config.pipeline import ConfigError, parse_config

    with pytest.raises(ObjectNameError) as refused:
        ObjectStore(url)
    assert found_in(str(refused.value)) == []
    with pytest.raises(ConfigError) as wrong:
        parse_config(tiny_document(storage={"url": url}))
    assert found_in(str(wrong.value)) == []


def test_mlflows_address_is_shown_without_its_password(monkeypatch):
    from tasks.config.home import shown_mlflow_uri

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"https://somebody:{SECRET[-2]}@mlflow.example/path")
    assert found_in(shown_mlflow_uri()) == []


def test_the_repository_holds_no_secret():
    """Keys, tokens and passwords have shapes; none of them is in a file that is published."""
    import re

    shapes = re.compile(
        r"AKIA[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----"
        r"|\bgh[pousr]_[A-Za-z0-9]{36}\b|\bxox[abp]-[0-9A-Za-z-]{20,}"
    )
    rooms = ("flows", "tasks", "training", "recognition", "speech", "storage", "devices")
    folders = (*rooms, "configs", "docs", "benchmarks")
    for path in (path for folder in folders for path in Path(ROOT, folder).rglob("*")):
        if path.suffix in (".py", ".md", ".yaml", ".yml", ".json", ".sh", ".toml"):
            assert shapes.search(path.read_text(encoding="utf-8")) is None, path
