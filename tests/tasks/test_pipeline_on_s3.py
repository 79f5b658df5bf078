"""A whole pipeline whose object store is a real S3 server that is stopped in the middle of every stage."""

import json
import logging
import os
import threading
from contextlib import contextmanager

import pytest
from support import copy_finished, tiny_document
from support import finished as finished_run

from storage.objects import ObjectStore
from tasks.config import credentials
from tasks.config.credentials_block import StorageCredentials
from tasks.config.home import home as data_folder
from tasks.config.pipeline import parse_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run, StageError, get_stage, stages_of
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD
from tasks.tracking.runs import client

PLANTED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")


@pytest.fixture
def block(s3_server, monkeypatch):
    """The server's credentials in a block, and nowhere in the environment."""
    values = s3_server.environment()
    for name in PLANTED:
        monkeypatch.delenv(name)
    made = StorageCredentials(
        access_key_id=values["AWS_ACCESS_KEY_ID"],
        secret_access_key=values["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=values["AWS_ENDPOINT_URL"],
        region=values["AWS_DEFAULT_REGION"],
    )
    asked = []
    monkeypatch.setattr(credentials, "_load", lambda name: asked.append(name) or made.values())
    monkeypatch.setattr(credentials, "_loaded", set())
    return asked


def on_s3(name, **storage):
    return parse_config(tiny_document(storage={"url": f"s3://speech/{name}", "shard_seconds": 20} | storage))


@pytest.mark.slow
def test_pipeline_runs_on_s3_and_leaves_no_secret(home, s3_server, block, caplog, capfd):
    caplog.set_level(logging.DEBUG, logger="tasks")
    copy_finished(home)  # for its synthesized corpus
    config = on_s3("pipeline", credentials="lab")
    run = Run(config, "on-s3")
    run_plainly(run)
    assert block == ["lab"]
    names = ObjectStore("s3://speech/pipeline").list("")
    assert {name.split("/")[0] for name in names} == {*run.results}
    assert run.results["score"].record["sets"]["test"]["words"] > 0
    again = Run(config, "on-s3-again")
    run_plainly(again)
    assert all(result.cached for result in again.results.values())
    secrets = [s3_server.environment()[name] for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")]
    written = [path for folder in (data_folder(), s3_server.root) for path in folder.rglob("*") if path.is_file()]
    texts = [path.read_bytes() for path in written] + [
        caplog.text.encode(),
        *(part.encode() for part in capfd.readouterr()),
    ]
    texts += [json.dumps([result.to_dict() for result in run.results.values()]).encode(), repr(run).encode()]
    assert not any(secret.encode() in text for secret in secrets for text in texts)


def test_unloadable_block_is_named_without_revealing_secrets(monkeypatch):
    monkeypatch.setattr(credentials, "_loaded", set())

    def load(name, _sync):
        raise ValueError("planted-secret")

    monkeypatch.setattr(StorageCredentials, "load", load)
    storage = on_s3("x", credentials="lab").storage
    with pytest.raises(credentials.CredentialsError, match="storage-credentials/lab.*PREFECT_API_URL") as caught:
        credentials.export_credentials(storage)
    assert "planted" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_new_key_drops_the_old_session_token(block, monkeypatch, s3_server):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another key")
    storage = on_s3("x", credentials="lab").storage
    credentials.export_credentials(storage)
    credentials.export_credentials(storage)
    assert "AWS_SESSION_TOKEN" not in os.environ
    assert {name: os.environ[name] for name in PLANTED} == s3_server.environment()
    credentials.export_credentials(storage, again=True)
    assert block == ["lab", "lab"]


def test_block_repr_shows_no_secret():
    made = StorageCredentials(access_key_id="planted-key", secret_access_key="planted-secret", session_token="planted")
    assert "planted" not in f"{made!r} {made} {made.model_dump_json()}"
    assert made.values()["session_token"] == "planted"


def test_training_on_memory_store_is_refused_with_a_remedy(home):
    copy_finished(home)
    config = parse_config(tiny_document(storage={"url": "memory://tiny", "shard_seconds": 20}))
    with pytest.raises(StageError, match="use a folder or s3"):
        run_plainly(Run(config, "in-memory"))


@contextmanager
def restarts(server, up_s=1.0, down_s=0.4, most=4):
    """Kills the server and starts it again, several times, while the block runs; it is up afterwards."""
    stop, done = threading.Event(), []

    def disturb():
        while len(done) < most and not stop.is_set():
            server.kill()
            stop.wait(down_s)
            server.start()
            done.append(1)
            stop.wait(up_s)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join(240)


@pytest.mark.slow
def test_sharding_survives_restarts_of_the_server(home, s3_server):
    copy_finished(home)
    run = Run(on_s3("sharding", shard_seconds=3), "disturbed")
    calm = Run(parse_config(tiny_document(storage={"shard_seconds": 3})), "calm")
    PREPARE.execute(run)
    PREPARE.execute(calm)
    SHARD.execute(calm)
    with restarts(s3_server, up_s=0.3) as done:
        SHARD.execute(run)
    assert done
    assert run.result("shard").record["sets"] == calm.result("shard").record["sets"]
    names = set(run.result("shard").store.list())
    assert names == set(calm.result("shard").store.list())


@pytest.mark.slow
def test_every_stage_survives_restarts_of_the_server(home, s3_server):
    copy_finished(home)
    calm = finished_run()[1]
    run = Run(on_s3("disturbed"), "disturbed")
    for name in stages_of(run.config):
        with restarts(s3_server):
            get_stage(name).execute(run)
    assert run.result("train").record["digest"] == calm.result("train").record["digest"]
    assert run.result("score").record["sets"] == calm.result("score").record["sets"]
    api = client()
    (version,) = api.search_model_versions(f"name = '{run.config.model_name}'")
    assert str(version.version) == run.result("register").record["version"]
    assert api.get_run(version.run_id).info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["train", "register"])
def test_lasting_outage_stops_a_stage_and_next_run_completes_it(home, s3_server, stage):
    copy_finished(home)
    calm = finished_run()[1]
    run = Run(on_s3(f"lasting-{stage}"), "interrupted")
    names = stages_of(run.config)
    for name in names[: names.index(stage)]:
        get_stage(name).execute(run)
    gone = threading.Timer(1.5 if stage == "train" else 0.2, s3_server.kill)
    gone.start()
    try:
        with pytest.raises((RuntimeError, OSError)):
            get_stage(stage).execute(run)
    finally:
        gone.join()
        s3_server.start()
    assert get_stage(stage).output(run).record() is None
    for name in names[names.index(stage) :]:
        get_stage(name).execute(run)
    assert run.result("train").record["digest"] == calm.result("train").record["digest"]
    assert len(client().search_model_versions(f"name = '{run.config.model_name}'")) == 1
