"""`starling storage`: output, deleted objects, and exit status."""

import json
import os
import time
from contextlib import contextmanager

import pytest
from support import copy_finished, write_config
from typer.testing import CliRunner

from flows.cli.app import app
from storage.disks import size_text
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.stages import StageOutput
from tasks.stages.base import StageError, lock_path
from tasks.stages.housekeeping import find_garbage, registered_outputs

STATES = ("prepare", "shard", "features", "train", "decode", "score", "register", "report")


@pytest.fixture
def store(home):
    """A copy of the finished run's objects; its models are not in this home's MLflow."""
    copy_finished(home)
    return ObjectStore(home / "objects")


def run(*words, status=0):
    done = CliRunner().invoke(app, ["storage", *map(str, words)])
    assert done.exit_code == status, (done.output, done.exception)
    return done.output


def run_json(*words, status=0):
    return json.loads(run(*words, "--json", status=status).splitlines()[-1])


def make_old(store, days=30):
    """Make all objects old."""
    then = time.time() - days * 86400
    for name in store.list():
        os.utime(store.local_path(name), (then, then))


def test_verify_finds_no_damage_in_a_finished_run(store):
    report = run_json("verify")
    assert report["ok"]
    assert report["indexes"] == 3
    assert report["shards"] >= 3
    assert "all intact" in run("verify", "--quick")


def test_damage_is_reported_with_status_1(store):
    (name, *_) = [name for name in store.list() if name.endswith(".tar")]
    store.write(name, store.read(name)[:-1])
    report = run_json("verify", status=1)
    assert [problem["object"] for problem in report["problems"]] == [name]
    assert name in run("verify", status=1).replace("\n", "")


def test_du_sums_add_up(store):
    report = run_json("du")
    assert set(report["stages"]) == set(STATES)
    assert report["bytes"] == sum(entry.size for entry in store.entries()) == sum(report["stages"].values())
    assert all(row["published"] and row["objects"] for row in report["outputs"])
    assert "total" in run("du")


def test_gc_deletes_only_on_request(store):
    left = StageOutput(store, "train", "f" * 16)
    left.store.write("checkpoints/1", bytes(5000))
    assert run_json("gc")["garbage"] == []  # it is young
    make_old(store)
    before = store.list()
    report = run_json("gc")
    assert [entry["name"] for entry in report["garbage"]] == [f"train/{'f' * 16}"]
    assert (report["bytes"], report["deleted"]) == (5000, [])
    assert "nothing was deleted" in run("gc")
    assert store.list() == before
    assert run_json("gc", "--delete")["deleted"] == [f"train/{'f' * 16}"]
    assert set(before) - set(store.list()) == {f"train/{'f' * 16}/checkpoints/1"}
    assert "nothing to delete" in run("gc", "--delete")


def test_gc_keeps_outputs_of_running_stages(store):
    from storage.locks import file_lock

    StageOutput(store, "train", "f" * 16).store.write("checkpoints/1", b"1")
    make_old(store)
    with file_lock(lock_path("train", "f" * 16), 0.0):
        assert run_json("gc", "--delete")["garbage"] == []
    assert len(run_json("gc", "--delete")["deleted"]) == 1


@contextmanager
def models(monkeypatch, registered):
    with monkeypatch.context() as patch:
        patch.setattr("tasks.stages.housekeeping.registered_outputs", lambda: registered)
        yield


def test_gc_keeps_all_dependencies_of_a_registered_model(store, finished, monkeypatch):
    make_old(store)
    key = finished.result("register").key
    with models(monkeypatch, {f"register/{key}": "tiny/1"}):
        kept = find_garbage(store, 3600.0, unregistered=True)
    assert kept.garbage == []
    assert {name.split("/")[0] for name, why in kept.kept.items() if why == "of a registered model"} == {"report"}
    with models(monkeypatch, {}):
        gone = find_garbage(store, 3600.0, unregistered=True)
    assert {entry.name.split("/")[0] for entry in gone.garbage} == set(STATES)
    assert find_garbage(store, 3600.0).garbage == []


def test_registered_models_are_found_in_mlflow(finished):
    key = finished.result("register").key
    assert registered_outputs() == {f"register/{key}": "tiny/1"}


def test_without_mlflow_no_output_counts_as_unregistered(home, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(StageError, match=r"MLflow at http://127\.0\.0\.1:9 cannot be asked"):
        registered_outputs()


def test_store_may_be_given_by_url_or_configuration(home, tmp_path):
    from support import tiny_document

    store = ObjectStore(tmp_path / "elsewhere")
    StageOutput(store, "shard", "a" * 16).store.write("x", b"12345")
    assert run_json("du", "--url", tmp_path / "elsewhere")["bytes"] == 5
    config = write_config(tmp_path / "c.yaml", tiny_document(storage={"url": store.url}))
    assert run_json("du", "--config", config)["store"] == store.url
    assert run_json("du")["bytes"] == 0


def test_gc_never_breaks_an_index(store):
    make_old(store)
    run("gc", "--delete")
    for name in store.list():
        if name.endswith("index.parquet"):
            ShardIndex.read(store, name)
    assert run_json("verify")["ok"]


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.5 TB")])
def test_sizes_are_formatted_with_units(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize("command", ["verify", "du"])
def test_missing_store_is_reported_as_an_error(home, tmp_path, command):
    assert "holds no output" in " ".join(run(command, "--url", tmp_path / "nothing", status=1).split())
